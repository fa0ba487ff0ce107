"""The failure this project began with: a stop in which everything goes wrong at once.

One child is already dead, another ignores SIGTERM, and the line over which it would be asked
raises. The first version stopped at the first error and left the second one running.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from observing import FREEZER, alive, frozen, state_of, wait_until
from stopbath.lifecycle import (
    Deadline,
    Escalation,
    Exit,
    GroupState,
    Policy,
    ProcessRef,
    WorkerState,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stopbath.lifecycle import WorkerGroup
    from stopbath.lifecycle._channel import Channel

pytestmark = pytest.mark.usefixtures("nothing_left")

QUICK = Escalation(drain_s=0.15, terminate_s=0.15, kill_s=0.4)


class RaisingChannel:
    """A control channel on which nothing can be sent."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(self, *_: Any) -> None:
        """Fail."""
        raise OSError("the request channel is broken")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


class RaisingRef(ProcessRef):
    """A process that may not be signalled."""

    def send(self, number: int) -> bool:
        """Fail."""
        raise PermissionError(f"may not send {number}")


class PowerlessRef(ProcessRef):
    """A process on which signals have no effect, as on one in an uninterruptible sleep."""

    def send(self, number: int) -> bool:  # noqa: ARG002
        """Do nothing."""
        return True


def inject(group: WorkerGroup, worker: int, kind: type[ProcessRef]) -> Callable[[], None]:
    """Put `kind` in the place of a worker's reference; gives the way back."""
    member = group._core.members[worker]
    ref = member.ref
    assert ref is not None
    member.ref = kind(ref.pid, ref.fileno(), ref.start)

    def undo() -> None:
        member.ref = ref

    return undo


def ignores_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(status.partition("SigIgn:")[2].split()[0], 16)
    return bool(mask >> (signal.SIGTERM - 1) & 1)


def pid_of(group: WorkerGroup, worker: int) -> int:
    pid = group.workers[worker].pid
    assert pid is not None
    return pid


def test_dead_deaf_and_broken_at_once(group_of: Callable[..., WorkerGroup]) -> None:
    """The deaf one ends by SIGKILL and is reaped, the others' ends are their own."""
    group = group_of("obedient", "deaf", "obedient", escalation=QUICK, policy=Policy.INDEPENDENT)
    dead, deaf = pid_of(group, 0), pid_of(group, 1)
    os.kill(dead, signal.SIGKILL)
    wait_until(lambda: group.workers[0].state is WorkerState.GONE, Deadline.after(5))
    assert ignores_sigterm(deaf)
    member = group._core.members[1]
    assert member.channel is not None
    member.channel = RaisingChannel(member.channel)  # type: ignore[assignment]

    report = group.shutdown(Deadline.after(5))

    first, second, third = report.workers
    assert (first.outcome, first.exit, first.steps) == ("exited", Exit(signal=9), ())
    assert (second.outcome, second.exit) == ("killed", Exit(signal=9))
    assert [taken.step for taken in second.steps] == ["drain", "SIGTERM", "SIGKILL"]
    assert "the request channel is broken" in (second.steps[0].error or "")
    assert (third.outcome, third.exit) == ("drained", Exit(code=0))
    assert state_of(deaf) == ""  # not even a zombie
    assert not report.clean
    assert not report.survivors
    assert group.state is GroupState.STOPPED


def test_one_that_cannot_be_signalled_never_stops_work_on_the_others(
    group_of: Callable[..., WorkerGroup],
) -> None:
    """The error is told with the step, and the worker becomes a survivor that is kept."""
    group = group_of("deaf", "deaf", "obedient", escalation=QUICK)
    undo = inject(group, 0, RaisingRef)

    report = group.shutdown(Deadline.after(5))

    assert [worker.outcome for worker in report.workers] == ["survived", "killed", "drained"]
    assert "may not send 9" in (report.workers[0].steps[-1].error or "")
    assert [survivor.name for survivor in report.survivors] == ["w0"]
    assert alive(pid_of(group, 0))
    undo()
    again = group.shutdown(Deadline.after(5))
    assert again.workers[0].outcome == "killed"
    assert not again.survivors


@contextmanager
def unkillable(kind: str, group: WorkerGroup, worker: int) -> Iterator[Callable[[], None]]:
    """Make a worker survive SIGKILL until the given function is called."""
    if kind == "frozen":
        with frozen(pid_of(group, worker)) as thaw:
            assert state_of(pid_of(group, worker)) == "D"
            yield thaw
    else:
        undo = inject(group, worker, PowerlessRef)

        def release() -> None:
            undo()
            os.kill(pid_of(group, worker), signal.SIGKILL)

        yield release


@pytest.fixture(params=["frozen", "powerless"])
def stand_in(request: pytest.FixtureRequest) -> str:
    if request.param == "frozen" and not (os.geteuid() == 0 and FREEZER.is_dir()):
        pytest.skip("no v1 freezer cgroup here: an unkillable process is only played")
    return str(request.param)


def test_a_survivor_is_named_kept_and_watched(
    group_of: Callable[..., WorkerGroup], stand_in: str
) -> None:
    """What SIGKILL cannot end is told with evidence, and its end is noticed when it comes."""
    group = group_of("deaf", "obedient", escalation=QUICK)
    with unkillable(stand_in, group, 0) as release:
        report = group.shutdown(Deadline.after(2))
        assert group.state is GroupState.SURVIVED
        assert [worker.outcome for worker in report.workers] == ["survived", "drained"]
        (survivor,) = report.survivors
        assert (survivor.pid, survivor.name) == (pid_of(group, 0), "w0")
        assert survivor.last_step == "SIGKILL"
        assert survivor.state
        assert "VmRSS" in survivor.evidence
        assert [it.pid for it in group.survivors] == [survivor.pid]
        assert group.workers[0].state is WorkerState.SURVIVED
        release()
        wait_until(lambda: group.state is GroupState.STOPPED, Deadline.after(5))
        assert group.survivors == ()
        assert group.workers[0].exit == Exit(signal=9)
        again = group.report
        assert again is not None
        assert again.survivors == ()
        assert again.workers[0].outcome == "killed"
        assert again.cause == report.cause
        assert group.shutdown() is again


def test_a_second_shutdown_takes_a_survivor_up_again(
    group_of: Callable[..., WorkerGroup], stand_in: str
) -> None:
    group = group_of("deaf", "obedient", escalation=QUICK)
    with unkillable(stand_in, group, 0) as release:
        first = group.shutdown(Deadline.after(1))
        second = group.shutdown(Deadline.after(0.3))
        assert second is not first
        assert [it.name for it in second.survivors] == ["w0"]
        assert [it.step for it in second.workers[0].steps].count("SIGKILL") == 2

        third = []
        caller = threading.Thread(target=lambda: third.append(group.shutdown(Deadline.after(5))))
        caller.start()
        release()
        caller.join()
        assert third[0].workers[0].outcome in {"killed", "survived"}  # before or after the release
        assert group.state is GroupState.STOPPED
        assert not group.survivors


def test_a_failure_and_an_explicit_stop_at_the_same_time_act_once(
    group_of: Callable[..., WorkerGroup],
) -> None:
    """Each worker gets each step once, the callback is called once, both callers get an answer."""
    for _ in range(3):
        heard, told = os.pipe()
        go, trigger = os.pipe()
        group = group_of(
            ("waits_for", {"args": ("kill",), "fds": {"go": go}}),
            ("counts_its_signals", {"fds": {"heard": told}}),
            ("counts_its_signals", {"fds": {"heard": told}}),
            escalation=QUICK,
        )
        for fd in (told, go):
            os.close(fd)
        calls: list[object] = []
        called = threading.Event()
        group.on_failure(
            lambda cause, calls=calls, called=called: (calls.append(cause), called.set())
        )  # type: ignore[misc]
        start = threading.Barrier(2)

        def kill(start: threading.Barrier = start, trigger: int = trigger) -> None:
            start.wait()
            os.write(trigger, b"x")

        other = threading.Thread(target=kill)
        other.start()
        start.wait()
        report = group.shutdown(Deadline.after(5))
        other.join()
        os.close(trigger)

        with os.fdopen(heard, "rb") as file:
            assert file.read() == b"xx"  # one SIGTERM for each of the two; EOF: both are dead
        for worker in report.workers[1:]:
            steps = [taken.step for taken in worker.steps]
            assert steps == sorted(set(steps), key=steps.index)
            assert worker.outcome == "killed"
        assert len(calls) == (0 if report.cause is None else 1)
        assert report.cause is None or called.wait(5)
