"""A group fails or signals a worker because somebody outside says so."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

import pytest

from observing import state_of, wait_until
from stopbath.lifecycle import Deadline, GroupState, NotStarted

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopbath.lifecycle import Cause, WorkerGroup


def test_a_worker_declared_at_fault_ends_its_group(group_of: Callable[..., WorkerGroup]) -> None:
    """The given words are the latched cause, and the worker is ended like any other."""
    group = group_of("obedient", "stops_itself")
    told = threading.Event()
    causes: list[Cause] = []
    group.on_failure(lambda cause: (causes.append(cause), told.set())[1])
    group.fail("w1", "made no progress")
    assert told.wait(5)
    report = group.shutdown(Deadline.after(5))
    assert [(cause.worker, cause.what) for cause in causes] == [("w1", "made no progress")]
    assert causes[0].pid == group.workers[1].pid
    assert (report.cause, report.survivors) == (causes[0], ())
    group.fail("w0", "too late")
    assert group.cause == causes[0]


def test_a_signal_reaches_the_worker_it_names(group_of: Callable[..., WorkerGroup]) -> None:
    group = group_of("obedient", "obedient")
    one, other = (worker.pid or 0 for worker in group.workers)
    group.signal("w1", signal.SIGSTOP)
    wait_until(lambda: state_of(other) == "T", Deadline.after(5))
    assert state_of(one) != "T"
    group.signal("w1", signal.SIGCONT)
    wait_until(lambda: state_of(other) != "T", Deadline.after(5))
    group.shutdown(Deadline.after(5))
    assert group.state is GroupState.STOPPED
    group.signal("w1", signal.SIGKILL)  # gone: nobody is hit


def test_wrong_use_is_an_error_at_the_caller(group_of: Callable[..., WorkerGroup]) -> None:
    with pytest.raises(LookupError, match="no worker 'w9'"):
        group_of("obedient").fail("w9", "is not here")
    with pytest.raises(NotStarted):
        group_of("obedient", start=False).signal("w0", signal.SIGTERM)


def test_a_worker_writes_its_stacks_at_sigquit(group_of: Callable[..., WorkerGroup]) -> None:
    """Whatever its function does with other signals, and goes on."""
    group = group_of("obedient", "in_a_c_call")
    for worker in group.workers:
        group.signal(worker.name, signal.SIGQUIT)

    def have_said() -> bool:
        lines = [member.words.last() for member in group._core.members]
        return all(any("most recent call first" in line for line in it) for it in lines)

    wait_until(have_said, Deadline.after(5))
    report = group.shutdown(Deadline.after(2))
    assert report.cause is None
    assert any(line.endswith("in obedient") for line in report.workers[0].last_stderr)
    assert any(line.endswith("in in_a_c_call") for line in report.workers[1].last_stderr)
