"""Somebody else's program: no handshake, no control socket, everything it starts included."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from stopbath.lifecycle._errors import KeeperDied
from stopbath.lifecycle._escalation import Action
from stopbath.lifecycle._member import Member
from stopbath.lifecycle._state import WorkerEvent, WorkerState
from stopbath.lifecycle._words import Words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stopbath.lifecycle._errors import Exit
    from stopbath.lifecycle._spawn import KeeperClient

__all__ = ["Command"]


def _nothing() -> None:
    """Be the callback of whoever wants none."""


class Command(Member):
    """An unmodified command. It is ready as soon as it runs.

    Its first step is the signal that arrived, passed on as it came; the next two go to
    everything of its tree, what left the session included, whether or not the main process
    still lives.
    """

    def __init__(
        self,
        argv: Sequence[str],
        name: str,
        *,
        env: Mapping[str, str],
        ignore: Sequence[int],
        capture: Words | None,
        new_session: bool,
        linger_s: float,
        asked: int = 0,
        started: Callable[[], None] = _nothing,
        stopped: Callable[[], None] = _nothing,
    ) -> None:
        super().__init__(name, 0, capture or Words(b""))
        self.linger_s = linger_s
        self._argv, self._env, self._ignore = list(argv), dict(env), list(ignore)
        self._capture, self._new_session = capture is not None, new_session
        self._asked = asked  # the id of a request that has been made already
        self._on_started, self._on_stopped = started, stopped
        self._keeper: KeeperClient | None = None
        self.first_signal = int(signal.SIGTERM)
        self.to_group = False

    @property
    def reachable(self) -> bool:
        """A dead main process leaves its strays to be ended."""
        return self.alive or self.state is WorkerState.EXITED

    def ask_for(self, keeper: KeeperClient, now: float) -> None:
        """Ask the keeper for the process; `OSError` when it cannot be."""
        self.move(WorkerEvent.SPAWN)
        self.started_at = self.heard_at = now
        self._keeper = keeper
        if self._asked:
            self.spawn_id = self._asked
            return
        write_end = self.words.open() if self._capture else None
        try:
            self.spawn_id = keeper.spawn(
                self.name,
                self._argv,
                self._env,
                {} if write_end is None else {2: write_end},
                worker=False,
                ignore=self._ignore,
                new_session=self._new_session,
            )
        finally:
            if write_end is not None:
                os.close(write_end)

    def let_go_on(self) -> None:
        """It runs already, and nobody can ask it whether it is ready."""
        self.phase = "running"
        self.move(WorkerEvent.READY)
        self._on_started()

    def stopped(self) -> None:
        """Somebody stopped it while it has the terminal."""
        self._on_stopped()

    def perform(self, action: Action, within_s: float) -> str | None:  # noqa: ARG002  (nobody to tell)
        """Have the keeper signal: it alone knows that a pid is still the one that was meant."""
        assert self._keeper is not None
        if action is Action.DRAIN:
            if self.alive and self.first_signal:
                self._keeper.signal_child(self.spawn_id, self.first_signal, group=self.to_group)
            return None
        number = signal.SIGTERM if action is Action.SIGTERM else signal.SIGKILL
        try:
            self._keeper.signal_tree(number)
        except KeeperDied:  # by its pidfd at least; the guardian adopts the rest, and ends it
            if self.ref is not None:
                self.ref.try_send(number)
        return None

    def crashed(self) -> bool:
        """Never to be said of it: how a command ends after a signal is its own business."""
        return False

    def fault_of(self, end: Exit) -> str | None:
        """A command may end; only a signal nobody here sent it is worth a word.

        SIGPIPE is how a pipeline ends whose reader has had enough.
        """
        return f"was {end}" if end.signal not in {None, signal.SIGPIPE} else None
