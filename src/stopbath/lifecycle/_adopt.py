"""Processes that an engine has started itself, under the same escalation and report."""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING, Any

from stopbath.lifecycle._errors import Exit
from stopbath.lifecycle._escalation import Action, Escalation
from stopbath.lifecycle._member import Member
from stopbath.lifecycle._process import ProcessRef
from stopbath.lifecycle._state import WorkerEvent
from stopbath.lifecycle._words import Words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stopbath.lifecycle._group import WorkerGroup
    from stopbath.lifecycle._spawn import KeeperClient

__all__ = ["Adopted", "Existing", "adopt"]


class Existing:
    """A process to be taken into a group: a `multiprocessing.Process` or a `subprocess.Popen`.

    Args:
        process: The object, started by this process.
        name: The name in reports; by default the object's own, else its pid.
        ask: Called with the object to ask for an orderly end (put a message on its queue, say).
            It must not block: it runs on the supervisor's thread. Without it, and when it
            raises, the stop goes on to SIGTERM at once.
    """

    __slots__ = ("ask", "name", "process")

    def __init__(
        self, process: Any, *, name: str = "", ask: Callable[[Any], object] | None = None
    ) -> None:
        if process.pid is None:
            raise ValueError(f"{process!r} has not been started")
        self.process = process
        self.name = name or getattr(process, "name", "") or f"pid{process.pid}"
        self.ask = ask

    def member(self, name: str, rank: int) -> Member:
        """Make the member that stands for it."""
        return Adopted(self, name, rank)


class Adopted(Member):
    """An existing process as the supervisor holds it.

    Its parent stays its parent, and its object stays right: the status is read through it. What
    it leaves behind is not ours to find; only a process that the keeper started has that.
    """

    kept = False

    def __init__(self, existing: Existing, name: str, rank: int) -> None:
        super().__init__(name, rank, Words(b""))
        self._existing = existing

    def ask_for(self, keeper: KeeperClient, now: float) -> None:  # noqa: ARG002  (it runs already)
        """Take hold of it; `ProcessLookupError` when it is gone and reaped."""
        self.move(WorkerEvent.SPAWN)
        self.started_at = self.heard_at = now
        self.ref = ProcessRef.open(self._existing.process.pid)

    def let_go_on(self) -> None:
        """It runs already, and whoever started it knows that it is ready."""
        self.phase = "running"
        self.move(WorkerEvent.READY)

    def perform(self, action: Action, within_s: float) -> str | None:  # noqa: ARG002
        """Ask through the caller's function, or signal through the pidfd."""
        assert self.ref is not None
        if action is Action.DRAIN:
            if self._existing.ask is None:
                return "nobody said how to ask it"
            self._existing.ask(self._existing.process)
            return None
        if action is Action.SIGKILL:
            self.ref.send(signal.SIGKILL)
            return None
        self.ref.send(signal.SIGTERM)
        self.ref.send(signal.SIGCONT)
        return None

    def own_status(self) -> Exit:
        """Reap it through its own object, which then knows the status too; it is dead already."""
        process = self._existing.process
        code = process.poll() if isinstance(process, subprocess.Popen) else process.exitcode
        if code is None:
            return Exit()
        return Exit(signal=-code) if code < 0 else Exit(code=code)

    def fault_of(self, end: Exit) -> str | None:
        """A rank never ends unasked: not even with exit code 0."""
        return f"was {end}" if end.signal else f"ended without being asked to ({end})"


def adopt(
    processes: Sequence[Any],
    *,
    name: str = "adopted",
    ask: Callable[[Any], object] | None = None,
    escalation: Escalation | None = None,
    **options: Any,
) -> WorkerGroup:
    """Put processes that this process has started under one escalation, watch and report.

    Gives a started group: `on_failure`, `shutdown`, `kill`, `survivors` work as for any other.
    `ask` and `escalation` as in `Existing` and `WorkerGroup`, which takes `options` too.
    """
    from stopbath.lifecycle._group import WorkerGroup

    specs = [one if isinstance(one, Existing) else Existing(one, ask=ask) for one in processes]
    group = WorkerGroup(name, specs, escalation=escalation, **options)
    group.start()
    return group
