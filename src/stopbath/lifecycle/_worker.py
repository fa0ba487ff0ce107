"""A worker that runs a Python function: control socket, handshake, stderr pipe."""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from stopbath.lifecycle._channel import Channel
from stopbath.lifecycle._errors import ProtocolError
from stopbath.lifecycle._escalation import Action
from stopbath.lifecycle._handshake import fork_frame, go_frame, payload_of
from stopbath.lifecycle._member import Member
from stopbath.lifecycle._spawn import CONTROL_FD, KeeperClient
from stopbath.lifecycle._state import WorkerEvent
from stopbath.lifecycle._words import Words

if TYPE_CHECKING:
    from stopbath.lifecycle._errors import Exit
    from stopbath.lifecycle._spec import WorkerSpec

__all__ = ["Worker"]

_CHILD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_child.py")
_STDERR_FD, _KEEPER_FD, _LIFELINE_FD, _FIRST_FD = 2, 4, 5, 10


class Worker(Member):
    """One `WorkerSpec` come to life."""

    def __init__(self, spec: WorkerSpec, name: str, rank: int) -> None:
        super().__init__(name, rank, Words(f"[{name}] ".encode() if spec.prefix else b""))
        self.spec = spec

    def ask_for(self, keeper: KeeperClient, now: float) -> None:
        """Make the sockets and ask the keeper for the process; `OSError` when it cannot be."""
        self.move(WorkerEvent.SPAWN)
        self.started_at = self.heard_at = now
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        try:
            write_end = self.words.open()
            try:
                self._ask(keeper, theirs.fileno(), write_end)
            finally:
                os.close(write_end)
        finally:
            theirs.close()

    def _ask(self, keeper: KeeperClient, control: int, stderr: int) -> None:
        fds = {CONTROL_FD: control, _STDERR_FD: stderr}
        fds |= {_FIRST_FD + i: fd for i, fd in enumerate(self.spec.fds.values())}
        keeper_fd = _KEEPER_FD if self.spec.keeper_access else None
        lifeline_fd = _LIFELINE_FD if self.spec.parent_death == "socket" else None
        ends = f"{CONTROL_FD},{lifeline_fd}" if lifeline_fd else "kernel"
        kept = sorted({*fds, *(fd for fd in (keeper_fd, lifeline_fd) if fd)} - {_STDERR_FD})
        words = [self.name, str(CONTROL_FD), ends, ",".join(map(str, kept))]
        self.spawn_id = keeper.spawn(
            self.name,
            [sys.executable, "-I", "-S", _CHILD, *words],
            {**os.environ, **self.spec.env},  # noqa: TID251  (passed on, not read)
            fds,
            keeper_fd=keeper_fd,
            lifeline_fd=lifeline_fd,
            fork=fork_frame(self.spec, words) if self.spec.preload else None,
        )

    def let_go_on(self) -> None:
        """Send the target; a child that is dead by now is told of by its pidfd."""
        assert self.channel is not None
        numbers = {name: _FIRST_FD + i for i, name in enumerate(self.spec.fds)}
        access = {"fd": _KEEPER_FD, "client_pid": os.getpid()} if self.spec.keeper_access else None
        payload = payload_of(self.spec)
        try:
            self.channel.send(go_frame(self.spec, numbers, access) | {"name": self.name}, [payload])
        except BrokenPipeError:
            return
        finally:
            os.close(payload)

    def perform(self, action: Action, within_s: float) -> str | None:
        """Ask over the control socket, or signal through the pidfd."""
        assert self.ref is not None
        if action is Action.SIGKILL:
            self.ref.send(signal.SIGKILL)
            return None
        asked = self._ask_to_stop(action, within_s)
        if action is Action.DRAIN:
            return asked
        self.ref.send(signal.SIGTERM)
        self.ref.send(signal.SIGCONT)  # a stopped process does not see it otherwise
        return None

    def _ask_to_stop(self, action: Action, within_s: float) -> str | None:
        if self.channel is None or self.channel.eof:
            return "the control socket is closed"
        try:
            self.channel.send({"t": "stop", "action": int(action), "within_s": within_s})
        except (BrokenPipeError, ProtocolError) as error:
            return str(error)
        return None

    def fault_of(self, end: Exit) -> str | None:
        """A worker never ends unasked: not even with exit code 0."""
        return f"was {end}" if end.signal else f"ended without being asked to ({end})"
