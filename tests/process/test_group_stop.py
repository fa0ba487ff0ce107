"""Stopping: bounded whatever the workers do, each step told, nobody forgotten."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from observing import state_of, wait_until
from stopbath.lifecycle import (
    Action,
    Deadline,
    Escalation,
    Exit,
    GroupState,
    ShutdownReport,
    WorkerGroup,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("nothing_left")

LONG = Escalation(drain_s=60, terminate_s=60, kill_s=5)


def pids(group: WorkerGroup) -> list[int]:
    return [worker.pid or 0 for worker in group.workers]


def in_a_stop(group: WorkerGroup, **how: Any) -> tuple[threading.Thread, list[ShutdownReport]]:
    """Begin a stop on another thread; it is in progress when this returns."""
    reports: list[ShutdownReport] = []
    caller = threading.Thread(target=lambda: reports.append(group.shutdown(**how)))
    caller.start()
    wait_until(lambda: group.state is not GroupState.READY, Deadline.after(5))
    return caller, reports


@pytest.mark.parametrize(
    ("target", "outcome", "end", "steps"),
    [
        ("obedient", "drained", Exit(code=0), ["drain"]),
        ("floods_stderr", "drained", Exit(code=0), ["drain"]),
        ("raises_when_asked", "exited", Exit(code=1), ["drain"]),
        ("stops_itself", "terminated", Exit(signal=15), ["drain", "SIGTERM"]),
        ("leaves_a_thread", "terminated", Exit(signal=15), ["drain", "SIGTERM"]),
        ("deaf", "killed", Exit(signal=9), ["drain", "SIGTERM", "SIGKILL"]),
        ("in_a_c_call", "killed", Exit(signal=9), ["drain", "SIGTERM", "SIGKILL"]),
        ("hangs_in_its_handler", "killed", Exit(signal=9), ["drain", "SIGTERM", "SIGKILL"]),
    ],
)
def test_the_report_says_which_step_ended_a_worker(
    group_of: Callable[..., WorkerGroup], target: str, outcome: str, end: Exit, steps: list[str]
) -> None:
    group = group_of(target, "obedient")
    (pid, other) = pids(group)
    if target == "stops_itself":
        wait_until(lambda: state_of(pid) == "T", Deadline.after(5))
    report = group.shutdown(Deadline.after(10))
    first, second = report.workers
    assert (first.outcome, first.exit) == (outcome, end)
    assert [taken.step for taken in first.steps] == steps
    assert [taken.at_s for taken in first.steps] == sorted(taken.at_s for taken in first.steps)
    assert first.ended_at_s is not None
    assert first.ended_at_s <= report.duration_s
    assert (second.outcome, second.exit) == ("drained", Exit(code=0))
    assert second.ended_at_s is not None
    assert report.clean == (outcome in {"drained", "terminated"})
    assert state_of(pid) == state_of(other) == ""
    assert report.asked_by == "shutdown()"


def test_last_words_are_in_the_report(group_of: Callable[..., WorkerGroup]) -> None:
    """However much was written before them; 64 lines are kept."""
    (worker,) = group_of("floods_stderr").shutdown().workers
    assert worker.last_stderr[-1] == "the last line"
    assert len(worker.last_stderr) == 64


@pytest.mark.parametrize("budget_s", [-1.0, 0.0, 0.3, 1.0])
def test_sixteen_that_ignore_everything_are_gone_by_the_deadline(
    group_of: Callable[..., WorkerGroup], budget_s: float
) -> None:
    """By the deadline and a tenth of a second, however far the graces reach beyond it."""
    group = group_of(*["deaf"] * 16, escalation=LONG)
    began = time.monotonic()
    report = group.shutdown(Deadline.after(budget_s))
    assert time.monotonic() - began < max(budget_s, 0) + 0.1
    assert {worker.outcome for worker in report.workers} == {"killed"}
    assert not report.survivors
    assert group.state is GroupState.STOPPED


def test_the_step_ends_when_the_last_worker_has(group_of: Callable[..., WorkerGroup]) -> None:
    group = group_of("obedient", "obedient", escalation=LONG)
    assert group.shutdown().duration_s < 1


def test_a_stop_is_idempotent(group_of: Callable[..., WorkerGroup]) -> None:
    group = group_of("obedient")
    report = group.shutdown(Deadline.after(5))
    assert group.shutdown() is report
    group.kill()
    assert group.shutdown(Deadline.after(-1)) is report
    assert group.report is report


def test_a_second_caller_joins_and_shortens(group_of: Callable[..., WorkerGroup]) -> None:
    group = group_of("deaf", escalation=LONG)
    caller, reports = in_a_stop(group)
    began = time.monotonic()
    report = group.shutdown(Deadline.after(0.4))
    caller.join()
    assert 0.1 < time.monotonic() - began < 0.6
    assert reports == [report]
    assert [taken.step for taken in report.workers[0].steps] == ["drain", "SIGTERM", "SIGKILL"]


def test_a_second_caller_never_lengthens(group_of: Callable[..., WorkerGroup]) -> None:
    group = group_of("deaf", escalation=Escalation(0.2, 0.2, 1))
    caller, _ = in_a_stop(group, first=Action.SIGTERM)
    report = group.shutdown(Deadline.after(60), first=Action.DRAIN)
    caller.join()
    assert report.duration_s < 1
    assert [taken.step for taken in report.workers[0].steps] == ["SIGTERM", "SIGKILL"]


def test_kill_shortens_a_stop_to_its_last_step(group_of: Callable[..., WorkerGroup]) -> None:
    group = group_of("deaf", escalation=LONG)
    caller, reports = in_a_stop(group)
    began = time.monotonic()
    group.kill()
    caller.join()
    assert time.monotonic() - began < 0.5
    assert [taken.step for taken in reports[0].workers[0].steps] == ["drain", "SIGKILL"]


@pytest.mark.parametrize("callers", [8])
def test_many_callers_at_once_get_one_account(
    group_of: Callable[..., WorkerGroup], callers: int
) -> None:
    """Also those that come while the last one's leave ends the supervisor."""
    for _ in range(4):
        group = group_of("obedient")
        reports: list[ShutdownReport] = []
        start = threading.Barrier(callers)

        def call(start: threading.Barrier = start, group: WorkerGroup = group) -> None:
            start.wait()
            reports.append(group.shutdown(Deadline.after(5)))  # noqa: B023  (joined below)

        threads = [threading.Thread(target=call) for _ in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(reports) == callers
        assert len({id(report) for report in reports}) == 1


def test_the_drain_waits_as_long_as_a_worker_announced(
    group_of: Callable[..., WorkerGroup],
) -> None:
    group = group_of(("asks_for_time", {"args": (0.6,)}), escalation=Escalation(0.1, 0.1, 1))
    (worker,) = group.shutdown().workers
    assert [taken.step for taken in worker.steps] == ["drain", "SIGTERM"]
    assert worker.steps[1].at_s == pytest.approx(0.6, abs=0.1)


def test_no_announcement_makes_a_stop_later_than_its_deadline(
    group_of: Callable[..., WorkerGroup],
) -> None:
    group = group_of(("asks_for_time", {"args": (1e6,)}))
    began = time.monotonic()
    group.shutdown(Deadline.after(0.4))
    assert time.monotonic() - began < 0.5


def test_a_stop_can_begin_at_a_harsher_step(group_of: Callable[..., WorkerGroup]) -> None:
    group = group_of("obedient", "deaf", escalation=Escalation(60, 0.2, 1))
    report = group.shutdown(first=Action.SIGTERM)
    assert [taken.step for taken in report.workers[1].steps] == ["SIGTERM", "SIGKILL"]
    assert report.duration_s < 1


def test_graces_of_nothing_still_give_sigkill_time_to_work(
    group_of: Callable[..., WorkerGroup],
) -> None:
    report = group_of("deaf", "obedient", escalation=Escalation(0, 0, 0)).shutdown()
    assert {worker.outcome for worker in report.workers} == {"killed"}


def test_a_worker_hears_every_stage(group_of: Callable[..., WorkerGroup]) -> None:
    heard, told = os.pipe()
    group = group_of(("heard", {"fds": {"heard": told}}), escalation=Escalation(0.3, 0.3, 1))
    os.close(told)
    group.shutdown()
    with os.fdopen(heard, "rb") as file:
        assert sorted(file.read()) == sorted(b"NMt")  # draiN, sigterM, and the signal itself


@pytest.mark.parametrize("interrupts", [1, 3])
def test_an_interrupt_shortens_a_stop_and_is_raised_when_it_is_over(
    group_of: Callable[..., WorkerGroup], interrupts: int
) -> None:
    """Ctrl-C in the middle never breaks the cleanup (F21)."""
    group = group_of("deaf", "deaf", escalation=LONG)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        wait_until(lambda: group.state is GroupState.STOPPING, Deadline.after(5))
        for _ in range(interrupts):
            signal.pthread_kill(main, signal.SIGINT)

    other = threading.Thread(target=interrupt)
    other.start()
    began = time.monotonic()

    def stop() -> None:
        try:
            group.shutdown()
        finally:
            other.join()

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert time.monotonic() - began < 2
    report = group.shutdown()
    assert group.state is GroupState.STOPPED
    assert {worker.outcome for worker in report.workers} == {"killed"}


def test_a_handler_that_raises_something_else_does_not_lose_the_stop(
    group_of: Callable[..., WorkerGroup],
) -> None:
    """The waiting thread may be torn away; the stop goes on without it."""
    group = group_of("obedient", "deaf", escalation=Escalation(0.3, 0.2, 1))

    def raise_in_main(*_: object) -> None:
        raise InterruptedError("a handler of the host")

    before = signal.signal(signal.SIGUSR1, raise_in_main)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        wait_until(lambda: group.state is GroupState.STOPPING, Deadline.after(5))
        signal.pthread_kill(main, signal.SIGUSR1)

    other = threading.Thread(target=interrupt)
    other.start()
    try:
        with pytest.raises(InterruptedError):
            group.shutdown()
    finally:
        signal.signal(signal.SIGUSR1, before)
        other.join()
    assert group.shutdown().workers[1].outcome == "killed"


def test_a_keeper_that_was_stopped_during_the_start_goes_on_with_the_stop(
    group_of: Callable[..., WorkerGroup],
) -> None:
    """Workers that were asked for and not born yet would be nobody's to end otherwise."""
    first = group_of("obedient")  # its keeper serves the second group too
    assert first._supervisor is not None
    keeper = first._supervisor.keeper.ref
    assert keeper is not None
    keeper.send(signal.SIGSTOP)
    wait_until(lambda: state_of(keeper.pid) == "T", Deadline.after(5))
    group = group_of(*["obedient"] * 2, ready=False)
    report = group.shutdown(Deadline.after(3))
    assert group.state is GroupState.STOPPED
    assert report.survivors == ()
    assert first.shutdown().clean
