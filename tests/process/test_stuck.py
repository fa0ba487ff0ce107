"""Hang, not death: a rank without progress ends its replica in time; a slow one never does."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from observing import state_of, wait_until
from stopbath.config import ServeConfig
from stopbath.errors import RequestStuck
from stopbath.executor.multiproc import MultiprocExecutor
from stopbath.lifecycle import Deadline

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("nothing_left")

WAIT_S = 15.0
BUDGET_S = 0.6
# A tick of the budget, half a second for the stacks and half a second for the signal.
VERDICT_S = BUDGET_S / 8 + 1.0


@contextlib.contextmanager
def running(ranks: int) -> Iterator[MultiprocExecutor]:
    config = ServeConfig(
        model="fake",
        ranks=ranks,
        parallel="cfg" if ranks > 1 else "none",
        drain_s=1.0,
        terminate_s=1.0,
        step_budget_s=BUDGET_S,
    )
    replica = MultiprocExecutor(config, "replica0", target="fake_ranks:main")
    replica.start()
    try:
        replica.wait_ready(Deadline.after(WAIT_S))
        yield replica
    finally:
        replica.shutdown(Deadline.after(WAIT_S))


def pids(replica: MultiprocExecutor) -> list[int | None]:
    return [rank.pid for rank in replica.status().ranks]


def words(replica: MultiprocExecutor) -> list[str]:
    """What each rank wrote last."""
    return ["\n".join(w.last_stderr) for w in replica.shutdown(Deadline.after(WAIT_S)).workers]


def test_a_stopped_rank_fails_its_replica_within_the_budget() -> None:
    """Its peer sits in the collective; the one that answers nothing is named.

    The peer's stack is kept, and the request ends as stuck.
    """
    with running(2) as replica:
        call = replica.call("meet", None, ranks="first")
        began = time.monotonic()
        with pytest.raises(RequestStuck, match=r"replica0/rank1 .*made no progress for 0\.6 s"):
            call.future.result(WAIT_S)
        assert BUDGET_S <= time.monotonic() - began < BUDGET_S + VERDICT_S + 0.5
        assert isinstance(replica.lost(), RequestStuck)
        peer, stopped = words(replica)
        assert "in wait_in_a_collective" in peer
        assert "in wait_in_a_collective" not in stopped


def test_a_rank_stopped_from_outside_in_the_middle_of_its_steps() -> None:
    """The request ends, and so does the rank, which SIGTERM alone would not reach."""
    with running(1) as replica:
        inside = threading.Event()
        call = replica.call("paced", 100_000, on_progress=lambda _s, _n: inside.set())
        assert inside.wait(WAIT_S)
        (pid,) = pids(replica)
        os.kill(pid or 0, signal.SIGSTOP)
        with pytest.raises(RequestStuck, match=r"rank0 .* does not answer"):
            call.future.result(WAIT_S)
        replica.shutdown(Deadline.after(WAIT_S))
        assert state_of(pid or 0) == ""


def test_a_rank_that_hangs_with_a_free_interpreter_says_where() -> None:
    """The cause itself carries the stack of the rank that it names."""
    with running(1) as replica:
        call = replica.call("meet", None)
        with pytest.raises(RequestStuck, match="its stack is in the log"):
            call.future.result(WAIT_S)
        cause = replica.status().cause
        assert cause is not None
        assert "in wait_in_a_collective" in "\n".join(cause.last_stderr)


def test_a_rank_lost_in_c_says_where_at_the_signal() -> None:
    """No thread of it can run, so it cannot answer; its stack is written all the same."""
    with running(1) as replica:
        call = replica.call("lost_in_c", None)
        with pytest.raises(RequestStuck, match="does not answer"):
            call.future.result(WAIT_S)
        cause = replica.status().cause
        assert cause is not None
        assert "in lost_in_c" in "\n".join(cause.last_stderr)


@pytest.mark.parametrize("method", ["paced", "hold_gil"])
def test_slow_is_not_stuck(method: str) -> None:
    """A long call with progress, and an interpreter held for most of the budget, over and over."""
    with running(2) as replica:
        before = pids(replica)
        params, times = (round(3 * BUDGET_S / 0.02), 1) if method == "paced" else (0.45, 4)
        calls = [replica.call(method, params) for _ in range(times)]
        for call in calls:
            assert [o.value for o in call.future.result(WAIT_S)] == ["done", "done"]
        assert (pids(replica), replica.status().cause) == (before, None)


def test_an_idle_rank_is_never_stuck() -> None:
    """Who owes nothing may be silent, stopped even, for many budgets."""
    with running(1) as replica:
        (pid,) = pids(replica)
        os.kill(pid or 0, signal.SIGSTOP)
        wait_until(lambda: state_of(pid or 0) == "T", Deadline.after(5))
        silent = Deadline.after(3 * BUDGET_S)
        wait_until(lambda: silent.passed, Deadline.after(WAIT_S))
        os.kill(pid or 0, signal.SIGCONT)
        (outcome,) = replica.call("rank", 1).future.result(WAIT_S)
        assert outcome.value == [0, 1]


_PROGRAM = """
    from stopbath.config import ServeConfig
    from stopbath.executor.multiproc import MultiprocExecutor

    config = ServeConfig(model="fake", step_budget_s=%s)
    replica = MultiprocExecutor(config, target="fake_ranks:main")
    replica.start()
    replica.wait_ready(Deadline.after(15))
    call = replica.call(%r, %r)
    tell("called", replica.status().ranks[0].pid)
    tell([outcome.value for outcome in call.future.result(15)], replica.status().cause)
    replica.shutdown(Deadline.after(15))
"""


@pytest.mark.parametrize("round_", range(3))
@pytest.mark.parametrize(
    ("method", "params"), [("paced", round(4 * BUDGET_S / 0.02)), ("hold_gil", 0.5)]
)
def test_a_server_that_was_stopped_itself_kills_nobody(
    program: Callable[..., subprocess.Popen[str]], method: str, params: Any, round_: int
) -> None:
    """What arrived meanwhile counts before the clock does, whatever the server was doing."""
    running = program(_PROGRAM % (BUDGET_S, method, params))
    assert running.stdout is not None
    assert running.stdout.readline().startswith("called")
    meanwhile = Deadline.after(0.03 * round_)
    wait_until(lambda: meanwhile.passed, Deadline.after(5))
    running.send_signal(signal.SIGSTOP)
    wait_until(lambda: state_of(running.pid) == "T", Deadline.after(5))
    stopped = Deadline.after(2.5 * BUDGET_S)
    wait_until(lambda: stopped.passed, Deadline.after(WAIT_S))
    running.send_signal(signal.SIGCONT)
    assert running.stdout.readline() == "['done'] None\n"
    assert running.wait(WAIT_S) == 0
