"""The examples of docs/lifecycle.md run as they stand, and keep what they promise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from observing import alive, wait_until
from stopbath.lifecycle import Deadline, ProcessRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("nothing_left")

EXAMPLES = Path(__file__).parents[2] / "examples"
Started = tuple["subprocess.Popen[str]", list[int]]


@pytest.fixture(params=["executor_like_vllm_omni.py", "launcher_like_sglang.py"])
def started(request: pytest.FixtureRequest) -> Iterator[Callable[[], Started]]:
    """Start one of the examples; gives it and the pids of its ranks."""
    running: list[subprocess.Popen[str]] = []
    ranks: list[ProcessRef] = []

    def start() -> Started:
        example = subprocess.Popen(
            [sys.executable, str(EXAMPLES / request.param)], stdout=subprocess.PIPE, text=True
        )
        running.append(example)
        assert example.stdout is not None
        words = example.stdout.readline().split()
        assert words[0] == "ready"
        ranks.extend(ProcessRef.open(int(word)) for word in words[1:])
        return example, [rank.pid for rank in ranks]

    yield start
    for rank in ranks:  # a test that failed may have left them, with the pipe
        rank.send(signal.SIGKILL)
        rank.close()
    for example in running:
        example.kill()
        example.communicate(timeout=10)


def test_ctrl_c_ends_every_rank_in_order(started: Callable[[], Started]) -> None:
    """A signal to the launcher drains the ranks; none has to be signalled."""
    example, pids = started()
    example.send_signal(signal.SIGINT)
    said, _ = example.communicate(timeout=20)
    assert said.count("drained") == len(pids), said
    assert not any(alive(pid) for pid in pids)


def test_a_killed_rank_is_told_and_its_peer_ended(started: Callable[[], Started]) -> None:
    """SIGKILL of one rank is reported with its name, and no peer stays."""
    example, pids = started()
    os.kill(pids[1], signal.SIGKILL)
    said, _ = example.communicate(timeout=20)
    assert f"rank1 (pid {pids[1]}) was killed by SIGKILL" in said
    assert not any(alive(pid) for pid in pids)


def test_a_stopped_rank_is_ended_all_the_same(started: Callable[[], Started]) -> None:
    """A rank that cannot be asked, because it is SIGSTOPped, is continued by SIGTERM's step."""
    example, pids = started()
    os.kill(pids[0], signal.SIGSTOP)
    wait_until(lambda: not _running(pids[0]), Deadline.after(5), "stopped")
    os.kill(pids[1], signal.SIGKILL)  # a broken group is not drained
    said, _ = example.communicate(timeout=20)
    assert "terminated" in said
    assert not any(alive(pid) for pid in pids)


def _running(pid: int) -> bool:
    return " T " not in Path(f"/proc/{pid}/stat").read_text()
