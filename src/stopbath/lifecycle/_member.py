"""A process that a group owns, as its supervisor holds it: identity, state, what was done to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stopbath.lifecycle._escalation import Action
from stopbath.lifecycle._evidence import survivor_of
from stopbath.lifecycle._report import Outcome, StepTaken, Survivor, WorkerReport
from stopbath.lifecycle._state import TRANSITIONS, WorkerEvent, WorkerState, next_state

if TYPE_CHECKING:
    from stopbath.lifecycle._channel import Channel, Frame
    from stopbath.lifecycle._errors import Exit
    from stopbath.lifecycle._process import ProcessRef
    from stopbath.lifecycle._spawn import KeeperClient
    from stopbath.lifecycle._words import Words

__all__ = ["Member"]


class Member:
    """The record of one process. Lives on the supervisor's thread; others only read fields.

    A `Worker` runs a Python function and talks over a control socket; a `Command` is somebody
    else's program; an `Adopted` one was started by somebody else.
    """

    kept = True
    """Whether the keeper is its parent and tells how it ended and when nothing of it is left."""

    def __init__(self, name: str, rank: int, words: Words) -> None:
        self.name, self.rank, self.words = name, rank, words
        self.state = WorkerState.CREATED
        self.spawn_id = 0
        self.spawn_errno = 0
        self.linger_s = 0.0  # how long what it left may live on after an end in order
        self.ref: ProcessRef | None = None
        self.pid: int | None = None
        self.channel: Channel | None = None
        self.exit: Exit | None = None
        self.status_due: float | None = None  # dead by its pidfd; until when to wait for its status
        self.info: Any = None
        self.phase = "being spawned"
        self.started_at = 0.0
        self.heard_at = 0.0
        self.ended_at: float | None = None
        self.budget_s = 0.0  # how long its own orderly stop may take, as it announced
        self.reports: list[Frame] = []
        self.leaving = False  # it said that it failed: it is on its way out by itself
        self.sent: Action | None = None
        self.ended_by: Action | None = None
        self.steps: list[tuple[Action, float, str | None]] = []

    @property
    def alive(self) -> bool:
        """Whether there is, or will be, a process that has not ended."""
        return self.state not in {WorkerState.CREATED, WorkerState.EXITED, WorkerState.GONE}

    @property
    def unborn(self) -> bool:
        """Whether it was asked for and there is no process yet."""
        return self.alive and self.ref is None

    @property
    def reachable(self) -> bool:
        """Whether a step of a stop can still do something for it."""
        return self.alive

    def move(self, event: WorkerEvent) -> None:
        """Take the transition that the table has for `event`."""
        self.state = next_state(TRANSITIONS, f"worker {self.name}", self.state, event)

    # -- what each kind does its own way

    def ask_for(self, keeper: KeeperClient, now: float) -> None:
        """Ask the keeper for the process; `OSError` when it cannot be."""
        raise NotImplementedError

    def let_go_on(self) -> None:
        """The pidfd is here: let the process begin its work."""
        raise NotImplementedError

    def perform(self, action: Action, within_s: float) -> str | None:
        """Do one step; gives what went wrong, or None."""
        raise NotImplementedError

    def own_status(self) -> Exit:
        """Learn how it ended, for one whose parent is not the keeper."""
        raise NotImplementedError

    def fault_of(self, end: Exit) -> str | None:
        """Say what is wrong with an end nobody asked for; None when it is in order."""
        raise NotImplementedError

    def stopped(self) -> None:
        """Somebody stopped a command that has the terminal."""

    # -- what is common

    def born(self, ref: ProcessRef) -> None:
        """The pidfd is here."""
        self.move(WorkerEvent.SPAWNED)
        self.ref, self.pid = ref, ref.pid
        self.phase = "starting"

    def ended(self, now: float) -> None:
        """It is dead; what follows is about what it left."""
        self.status_due = None
        self.ended_at, self.ended_by = now, self.sent
        self.move(WorkerEvent.EXITED)

    def act(self, action: Action, now: float, within_s: float) -> None:
        """Do one step of a stop; an error is recorded, never raised.

        One that is not ready has nothing to drain, and one that cannot be asked is not waited
        for: both go on to SIGTERM at once.
        """
        if self.sent is not None and self.sent >= action:
            return
        if self.leaving and action < Action.SIGKILL:
            self.move(WorkerEvent.STOP)
            return
        if action is Action.DRAIN and self.alive and self.state is not WorkerState.READY:
            action = Action.SIGTERM
        self.move(WorkerEvent.STOP)
        if self.ref is None:  # not born yet: stopped as soon as the pid is known
            return
        try:
            error = self.perform(action, within_s)
        except Exception as exception:  # an error on one never stops the others
            error = repr(exception)
        self.sent = action
        self.steps.append((action, now, error))
        if error is not None and action is Action.DRAIN:
            self.act(Action.SIGTERM, now, within_s)

    def close(self) -> None:
        """Let go of everything; the supervisor has taken it out of its selector."""
        if self.channel is not None:
            self.channel.close()
        self.words.close()
        if self.ref is not None:
            self.ref.close()

    # -- account

    def outcome(self) -> Outcome:
        """Name the step that ended it."""
        if self.alive:
            return "survived"
        if self.ended_by is Action.SIGKILL:
            return "killed"
        if self.ended_by is Action.SIGTERM:
            return "terminated"
        asked = self.ended_by is Action.DRAIN and (self.exit is None or self.exit.code == 0)
        return "drained" if asked else "exited"

    def report(self, began: float) -> WorkerReport:
        """Give the account of its end, in seconds after `began`."""
        return WorkerReport(
            self.name,
            self.rank,
            self.pid,
            self.outcome(),
            self.exit,
            tuple(StepTaken(action.step, at - began, error) for action, at, error in self.steps),
            None if self.ended_at is None else max(0.0, self.ended_at - began),
            self.words.last(),
            crashed=self.crashed(),
        )

    def crashed(self) -> bool:
        """Whether it was asked to finish and ended by an error instead."""
        return self.ended_by is Action.DRAIN and self.outcome() == "exited"

    def survivor(self) -> Survivor:
        """Say what /proc knows of why it is still alive."""
        assert self.pid is not None
        return survivor_of(self.pid, self.name, self.sent.step if self.sent else "none")
