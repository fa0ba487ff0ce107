"""Typed errors: who, what, in which phase."""

from __future__ import annotations

import signal
import sys
from typing import NamedTuple

__all__ = [
    "LOST_KEEPER",
    "Cause",
    "Exit",
    "IllegalTransition",
    "KeeperDied",
    "LifecycleError",
    "NotStarted",
    "ProtocolError",
    "StartRefused",
    "StartupError",
    "WorkerDied",
]


LOST_KEEPER = "lost its keeper, which ended"
"""What is said of a worker whose keeper is dead."""


class Exit(NamedTuple):
    """How a process ended: a code, a signal, or neither when nobody could learn it."""

    code: int | None = None
    signal: int | None = None

    @classmethod
    def from_wait(cls, si_code: int, si_status: int) -> Exit:
        """Read the fields of `waitid(2)`: CLD_EXITED is 1, CLD_KILLED 2, CLD_DUMPED 3."""
        return cls(code=si_status) if si_code == 1 else cls(signal=si_status)

    def __str__(self) -> str:
        if self.signal is not None:
            return f"killed by {signal_name(self.signal)}"
        if self.code is not None:
            return f"exit code {self.code}"
        return "exit status unknown"


def signal_name(number: int) -> str:
    """Name a signal as people write it, real-time signals included."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Cause(NamedTuple):
    """The first fault of a group, latched once.

    `what` says it in one line without the worker's name; `last_stderr` holds at most the last
    64 lines of that worker, oldest first. `exit` of a worker that raised is known once it has
    ended: in `group.cause` and in the report, not yet in what a callback is given.
    """

    worker: str
    pid: int | None
    phase: str
    what: str
    exit: Exit | None
    last_stderr: tuple[str, ...]

    def is_of(self, worker: str, pid: int | None) -> bool:
        """Whether it is this worker's."""
        return (self.worker, self.pid) == (worker, pid)

    def __str__(self) -> str:
        pid = f" (pid {self.pid})" if self.pid else ""
        words = f"; last words: {self.last_stderr[-1]}" if self.last_stderr else ""
        return f"{self.worker}{pid} {self.what} while {self.phase}{words}"


class LifecycleError(Exception):
    """Base of everything this layer raises on purpose."""


class NotStarted(LifecycleError):
    """Something was asked of a group that was never started."""


class IllegalTransition(LifecycleError):
    """An event came in a state that has no row for it."""

    def __init__(self, who: str, state: str, event: str) -> None:
        super().__init__(f"{who}: {event!r} cannot happen while {state}")
        self.who, self.state, self.event = who, state, event


class ProtocolError(LifecycleError):
    """The other side of a control socket sent something that is not a frame."""


class KeeperDied(LifecycleError):
    """The keeper ended, so that nothing can be started any more."""


class StartRefused(LifecycleError):
    """A worker's function cannot do what it was asked, and says so in words for the user.

    Reported as it is, without a traceback: nothing is broken, something was asked wrongly.
    """


class WorkerDied(LifecycleError):
    """A worker ended without being asked to."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(str(cause))
        self.cause = cause


class StartupError(LifecycleError):
    """A group did not become ready; its workers are gone by the time this is raised.

    `cause` names the worker, its exit and its last stderr lines; `report` is the account of
    the stop that followed.
    """

    def __init__(self, cause: Cause, report: object = None) -> None:
        lines = "".join(f"\n  | {line}" for line in cause.last_stderr[-12:])
        super().__init__(f"{cause.worker} {cause.what} while {cause.phase}{lines}")
        self.cause = cause
        self.report = report


def describe_exception(error: BaseException) -> str:
    """Say an exception in one line, with its type."""
    text = str(error) or "no message"
    return f"{type(error).__name__}: {text}"


def say(line: str) -> None:
    """Write one line on stderr; a closed or full stderr must never stop a cleanup."""
    try:
        sys.stderr.write(f"stopbath: {line}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return
