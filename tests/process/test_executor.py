"""The executor over real processes without a model: every future ends, with the right thing."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import fake_ranks
from observing import wait_until
from stopbath.config import ServeConfig
from stopbath.errors import (
    DeadlinePassed,
    Draining,
    Overloaded,
    RequestStuck,
    UsageError,
    WorkerLost,
)
from stopbath.executor import multiproc
from stopbath.executor.inproc import InprocExecutor
from stopbath.executor.multiproc import MultiprocExecutor
from stopbath.lifecycle import Deadline, GroupState, StartupError, WorkerState
from stopbath.messages import CANCELLED

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 15.0
TARGET = "fake_ranks:main"


def executor(
    ranks: int = 2, model: str = "fake", kind: type[MultiprocExecutor] = MultiprocExecutor
) -> MultiprocExecutor:
    config = ServeConfig(
        model=model, ranks=ranks, parallel="cfg" if ranks > 1 else "none", drain_s=2.0
    )
    return kind(config, "replica0", target=TARGET)


@pytest.fixture(params=[MultiprocExecutor, InprocExecutor], ids=["multiproc", "inproc"])
def kind(request: pytest.FixtureRequest) -> type[MultiprocExecutor]:
    """Ranks as processes and ranks as threads, for what both promise."""
    made: type[MultiprocExecutor] = request.param
    return made


@contextlib.contextmanager
def running(
    ranks: int = 2, model: str = "fake", kind: type[MultiprocExecutor] = MultiprocExecutor
) -> Iterator[MultiprocExecutor]:
    replica = executor(ranks, model, kind)
    replica.start()
    try:
        assert replica.wait_ready(Deadline.after(WAIT_S)).family == "fake"
        yield replica
    finally:
        replica.shutdown(Deadline.after(WAIT_S))


def answer(handle: Any) -> Any:
    return [outcome.value for outcome in handle.future.result(WAIT_S)]


def begun(replica: MultiprocExecutor, method: str, **how: Any) -> Any:
    """Begin a call, and wait until rank 0 is in it."""
    inside = threading.Event()
    handle = replica.call(method, None, on_progress=lambda _s, _n: inside.set(), **how)
    assert inside.wait(WAIT_S)
    return handle


def count_fds_and_threads() -> tuple[int, int]:
    return sum(1 for _ in Path("/proc/self/fd").iterdir()), threading.active_count()


def test_calls_reach_all_ranks_or_answer_from_the_first(kind: type[MultiprocExecutor]) -> None:
    with running(kind=kind) as replica:
        assert answer(replica.call("rank", 5)) == [[0, 5], [1, 5]]
        assert answer(replica.call("rank", 6, ranks="first")) == [[0, 6]]
        status = replica.status()
        assert status.state is GroupState.READY
        assert [rank.state for rank in status.ranks] == [WorkerState.READY] * 2
        assert all(rank.pid and rank.last_progress_s is not None for rank in status.ranks)


def test_everything_is_given_back(kind: type[MultiprocExecutor]) -> None:
    """Threads and descriptors are as many after a replica's life as before."""
    before = count_fds_and_threads()
    for _ in range(3):
        with running(kind=kind) as replica:
            answer(replica.call("rank", "x" * 200_000))
            replica.call("hold", None)
        assert count_fds_and_threads() == before


def test_an_error_of_one_rank_comes_with_its_traceback_beside_the_others_answers(
    kind: type[MultiprocExecutor],
) -> None:
    """And ends the call only: the next one works."""
    with running(kind=kind) as replica:
        one, two = replica.call("fails", 5).future.result(WAIT_S)
        assert (one.ok, one.value) == (True, 5)
        assert (two.ok, two.error_kind, two.error_message) == (
            False,
            "LookupError",
            "no such layer",
        )
        assert 'fake_ranks.py", line' in two.traceback
        assert answer(replica.call("fails", 6, ranks="first")) == [6]


def test_a_cancel_ends_the_call_on_all_ranks_and_the_next_call_works(
    kind: type[MultiprocExecutor],
) -> None:
    with running(kind=kind) as replica:
        held = begun(replica, "hold")
        replica.cancel(held.id)
        assert [o.error_kind for o in held.future.result(WAIT_S)] == [CANCELLED] * 2
        replica.cancel(held.id)
        assert answer(replica.call("rank", 1)) == [[0, 1], [1, 1]]


def test_a_deadline_ends_the_future_and_frees_the_ranks(kind: type[MultiprocExecutor]) -> None:
    with running(kind=kind) as replica:
        began = time.monotonic()
        held = replica.call("brood", None, deadline=Deadline.after(0.2))
        with pytest.raises(DeadlinePassed):
            held.future.result(WAIT_S)
        assert 0.2 <= time.monotonic() - began < 1.0
        assert answer(replica.call("rank", 1)) == [[0, 1], [1, 1]]


def test_a_deadline_holds_although_the_ranks_are_frozen() -> None:
    """A stopped rank answers nothing; late replies after it wakes find nobody."""
    with running(1) as replica:
        begun(replica, "freeze")
        waiting = replica.call("rank", 1, deadline=Deadline.after(0.3))
        with pytest.raises(DeadlinePassed):
            waiting.future.result(WAIT_S)
        os.kill(replica.status().ranks[0].pid or 0, signal.SIGCONT)
        assert answer(replica.call("rank", 2)) == [[0, 2]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_every_future_at_once_naming_rank_and_signal(rank: int) -> None:
    with running() as replica:
        causes: list[Any] = []
        replica.on_failure(causes.append)
        held = [begun(replica, "hold"), replica.call("hold", None, ranks="first")]
        ended_s: list[float] = []
        held[1].future.add_done_callback(lambda _future: ended_s.append(time.monotonic()))
        killed_s = time.monotonic()
        os.kill(replica.status().ranks[rank].pid or 0, signal.SIGKILL)
        for call in held:
            with pytest.raises(WorkerLost, match=rf"rank{rank} .*SIGKILL"):
                call.future.result(WAIT_S)
        assert ended_s[0] - killed_s < 0.5
        with pytest.raises(WorkerLost, match=f"rank{rank}"):
            replica.call("rank", 1).future.result(0)
        late: list[Any] = []
        replica.on_failure(late.append)
        assert late == causes == [replica.status().cause]


def test_the_echo_of_a_death_is_not_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEER_LOST comes from a healthy rank: the call waits for the death that must follow."""
    with running() as replica:
        monkeypatch.setattr(multiproc, "_SUSPECT_S", WAIT_S)
        held = replica.call("lose", None, ranks="first")
        assert answer_within(held, 0.2) is None
        os.kill(replica.status().ranks[1].pid or 0, signal.SIGKILL)
        with pytest.raises(WorkerLost, match=r"rank1 .*SIGKILL"):
            held.future.result(WAIT_S)


def answer_within(handle: Any, wait_s: float) -> Any:
    with contextlib.suppress(TimeoutError):
        return handle.future.result(wait_s)
    return None


def test_a_rank_that_hangs_up_and_lives_ends_the_replica(
    monkeypatch: pytest.MonkeyPatch, kind: type[MultiprocExecutor]
) -> None:
    """No death follows the end of the channel: after a while that end is the cause itself."""
    monkeypatch.setattr(multiproc, "_SUSPECT_S", 0.2)
    with running(1, "lingers", kind) as replica:
        lost = replica.call("hang_up", None)
        with pytest.raises(WorkerLost, match=r"rank0 .*closed its data channel"):
            lost.future.result(WAIT_S)


def test_a_stop_ends_pending_calls_first_and_leaves_the_ranks_drained(
    kind: type[MultiprocExecutor],
) -> None:
    replica = executor(kind=kind)
    replica.start()
    replica.wait_ready(Deadline.after(WAIT_S))
    held = begun(replica, "hold")
    began = time.monotonic()
    report = replica.shutdown(Deadline.after(WAIT_S))
    assert time.monotonic() - began < 2.0
    assert [worker.outcome for worker in report.workers] == ["drained"] * 2
    for call in (held, replica.call("rank", 1)):
        with pytest.raises(Draining):
            call.future.result(0)
    assert replica.shutdown(Deadline.after(1)).clean


def test_a_failed_start_names_the_rank_and_leaves_nothing(kind: type[MultiprocExecutor]) -> None:
    before = count_fds_and_threads()
    replica = executor(model="raises", kind=kind)
    replica.start()
    with pytest.raises(StartupError, match="rank1 raised RuntimeError: no such weights"):
        replica.wait_ready(Deadline.after(WAIT_S))
    with pytest.raises(WorkerLost, match="rank1"):
        replica.call("rank", 1).future.result(0)
    replica.shutdown(Deadline.after(WAIT_S))
    assert count_fds_and_threads() == before


def test_a_frozen_rank_never_blocks_the_caller() -> None:
    """Calls queue up to a bound and are refused beyond it; the cancel does not block either."""
    with running() as replica:
        begun(replica, "freeze")
        began = time.monotonic()
        calls = [replica.call("rank", "x" * 60_000) for _ in range(1500)]
        replica.cancel(calls[0].id)
        assert time.monotonic() - began < WAIT_S / 2
        with pytest.raises(Overloaded):
            calls[-1].future.result(0)


def test_a_callback_that_raises_does_not_end_the_pump(kind: type[MultiprocExecutor]) -> None:
    with running(1, kind=kind) as replica:
        call = begun(replica, "hold")  # still under way when the callback is added

        def explode(_future: object) -> None:
            raise SystemExit

        call.future.add_done_callback(explode)
        replica.cancel(call.id)
        assert call.future.result(WAIT_S)[0].error_kind == CANCELLED
        assert answer(replica.call("rank", 2)) == [[0, 2]]


def test_a_callback_may_shut_the_executor_down(kind: type[MultiprocExecutor]) -> None:
    """The pump does not wait for itself."""
    with running(1, kind=kind) as replica:
        done = threading.Event()

        def stop(_future: object) -> None:
            replica.shutdown(Deadline.after(WAIT_S))
            done.set()

        replica.call("rank", 1).future.add_done_callback(stop)
        assert done.wait(WAIT_S)


def test_what_a_thread_does_not_end_is_named_and_nothing_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A call that hangs cannot be ended in this process: its requests fail and it is a survivor."""
    config = ServeConfig(model="fake", drain_s=0.2, terminate_s=0.1, kill_s=0.1, step_budget_s=0.3)
    replica = InprocExecutor(config, "replica0", target=TARGET)
    release = threading.Event()
    monkeypatch.setattr(fake_ranks, "hang", release.wait)
    replica.start()
    replica.wait_ready(Deadline.after(WAIT_S))
    stuck = replica.call("generate", {"prompt": "hang"})
    with pytest.raises(RequestStuck, match=r"rank0 .*made no progress for 0.3 s"):
        stuck.future.result(WAIT_S)
    report = replica.shutdown(Deadline.after(WAIT_S))
    assert report.duration_s < 1.0
    assert [(s.name, s.pid) for s in report.survivors] == [("replica0/rank0", os.getpid())]
    assert "in generate" in report.survivors[0].evidence["stack"]
    assert "fake_ranks.py" in capfd.readouterr().err, "its stack is in the log"
    release.set()
    by = Deadline.after(WAIT_S)
    while replica.shutdown(by).survivors:
        assert not by.passed
    assert replica.shutdown(by).workers[0].outcome == "exited"


def test_an_executor_in_this_process_has_one_rank() -> None:
    with pytest.raises(UsageError, match="--executor inproc runs on 1 rank, not on 2"):
        ServeConfig(ranks=2, parallel="cfg", executor="inproc").checked()


def asked(
    replica: MultiprocExecutor, method: str, **how: Any
) -> tuple[threading.Thread, list[Any]]:
    """Ask on a thread, which keeps what came of it."""
    came: list[Any] = []

    def ask() -> None:
        try:
            came.extend(outcome.value for outcome in replica.ask(method, None, **how))
        except Exception as error:  # noqa: BLE001
            came.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread, came


def reader_of(replica: MultiprocExecutor) -> int | None:
    assert replica._pump is not None
    return replica._pump._reader


def asking(
    replica: MultiprocExecutor, method: str, **how: Any
) -> tuple[threading.Thread, list[Any]]:
    """Ask on a thread, and wait until that thread reads for everybody."""
    thread, came = asked(replica, method, **how)
    wait_until(lambda: reader_of(replica) == thread.ident, Deadline.after(WAIT_S))
    return thread, came


def switches_of(thread_name: str) -> int:
    thread = next(t for t in threading.enumerate() if t.name == thread_name)
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return sum(int(line.split()[1]) for line in status.splitlines() if "ctxt" in line)


def test_a_call_that_is_waited_for_wakes_no_other_thread() -> None:
    with running(1) as replica:
        asked(replica, "rank")[0].join(WAIT_S)
        before = switches_of("stopbath-pump-replica0")
        for _ in range(50):
            thread, came = asked(replica, "rank")
            thread.join(WAIT_S)
            assert came == [[0, None]]
        assert switches_of("stopbath-pump-replica0") - before < 10


def test_who_waits_for_a_call_reads_for_everybody() -> None:
    """Others get their answers while it waits, and after it has gone."""
    with running(1) as replica:
        handle = begun(replica, "hold")
        thread, came = asking(replica, "rank")
        replica.cancel(handle.id)
        assert handle.future.result(WAIT_S)[0].error_kind == CANCELLED
        thread.join(WAIT_S)
        assert came == [[0, None]]
        assert answer(replica.call("rank", 1)) == [[0, 1]]


def test_a_deadline_ends_a_call_that_is_waited_for() -> None:
    """The clock is the pump's thread's, although another reads."""
    with running(1) as replica:
        begun(replica, "freeze")
        thread, came = asking(replica, "rank", deadline=Deadline.after(0.2))
        thread.join(WAIT_S)
        assert isinstance(came[0], DeadlinePassed)
        os.kill(replica.status().ranks[0].pid or 0, signal.SIGCONT)


def test_a_death_ends_a_call_that_is_waited_for() -> None:
    with running() as replica:
        thread, came = asking(replica, "hold")
        os.kill(replica.status().ranks[1].pid or 0, signal.SIGKILL)
        thread.join(WAIT_S)
        assert isinstance(came[0], WorkerLost)
        assert "rank1" in str(came[0])


def test_the_end_of_a_channel_is_due_although_another_thread_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(multiproc, "_SUSPECT_S", 0.2)
    with running(1, "lingers") as replica:
        asked(replica, "rank")[0].join(WAIT_S)  # the pump's thread sleeps until its next tick
        thread, came = asked(replica, "hang_up")
        thread.join(WAIT_S)
        assert "closed its data channel" in str(came[0])


def test_a_stop_ends_a_call_that_is_waited_for() -> None:
    """Nothing is closed under the thread that reads."""
    with running(1) as replica:
        thread, came = asking(replica, "hold")
        began = time.monotonic()
        replica.shutdown(Deadline.after(WAIT_S))
        thread.join(WAIT_S)
        assert isinstance(came[0], Draining)
        assert time.monotonic() - began < 2.0
