"""Ranks with a real model and real collectives: one is stopped, the replica fails closed."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

import checkpoints
from observing import state_of, wait_until
from stopbath.config import ServeConfig
from stopbath.errors import RequestStuck
from stopbath.executor.multiproc import MultiprocExecutor
from stopbath.lifecycle import Deadline
from stopbath.messages import GENERATE, GenerationRequest

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("diffusers")

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

START_S, WAIT_S = 120.0, 60.0
BUDGET_S = 3.0
REQUEST = GenerationRequest(
    id="r", prompt="a seven", width=32, height=32, seed=7, num_inference_steps=1000,
    guidance_scale=3.0,
)  # fmt: skip


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_collective_that_hangs_fails_closed_within_the_budget(
    tmp_path: Path, stopped: int
) -> None:
    """Not after the collective's own minutes; the stack of the peer says where it waits."""
    config = ServeConfig(
        model=str(checkpoints.sd3(tmp_path / "sd3")),
        ranks=2,
        parallel="cfg",
        device="cpu",
        zygote=True,
        terminate_s=1.0,
        step_budget_s=BUDGET_S,
    )
    replica = MultiprocExecutor(config)
    replica.start()
    try:
        replica.wait_ready(Deadline.after(START_S))
        inside = threading.Event()
        params = {name: getattr(REQUEST, name) for name in REQUEST.__struct_fields__}
        call = replica.call(
            GENERATE, params, ranks="first", on_progress=lambda _s, _n: inside.set()
        )
        assert inside.wait(WAIT_S)
        pid = replica.status().ranks[stopped].pid or 0
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: state_of(pid) == "T", Deadline.after(5))
        began_s = time.monotonic()
        name = f"replica0/rank{stopped} .*made no progress for 3 s and does not answer"
        with pytest.raises(RequestStuck, match=name):
            call.future.result(WAIT_S)
        # A tick of the budget and a second for the stacks; the rest is a busy machine's.
        assert BUDGET_S - 0.5 <= time.monotonic() - began_s < BUDGET_S * 9 / 8 + 1.0 + 1.0
    finally:
        report = replica.shutdown(Deadline.after(WAIT_S))
    assert not report.survivors
    assert "in all_gather" in "\n".join(report.workers[1 - stopped].last_stderr)
