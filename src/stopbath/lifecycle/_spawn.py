"""The client's side of the keeper: ask for a process, be told what became of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, NamedTuple

from stopbath.lifecycle._channel import Channel, Frame
from stopbath.lifecycle._errors import Exit, KeeperDied, ProtocolError
from stopbath.lifecycle._process import ProcessRef, dup_high, own_start, reap

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stopbath.lifecycle._deadline import Deadline
    from stopbath.lifecycle._registry import Record

__all__ = [
    "CONTROL_FD",
    "Gone",
    "KeeperClient",
    "Note",
    "SpawnFailed",
    "Spawned",
    "Stopped",
    "StraysLeft",
    "WorkerExited",
]

CONTROL_FD = 3
_HERE = os.path.dirname(os.path.abspath(__file__))


class Spawned(NamedTuple):
    """A process was started; the receiver owns `ref`."""

    id: int
    name: str
    ref: ProcessRef
    mine: bool


class SpawnFailed(NamedTuple):
    """A process could not be started."""

    id: int
    errno: int
    why: str
    mine: bool


class WorkerExited(NamedTuple):
    """A process is dead, by its parent's word."""

    id: int
    name: str
    pid: int
    exit: Exit
    mine: bool


class StraysLeft(NamedTuple):
    """What a dead worker left, or may have, and what is still ending: dicts of pid and argv."""

    id: int
    left: list[Frame]
    mine: bool


class Stopped(NamedTuple):
    """A command that has the terminal was stopped, by Ctrl-Z as a rule."""

    id: int
    mine: bool


class Note(NamedTuple):
    """Something that whoever runs the workers should read."""

    what: str
    mine: bool


class Gone(NamedTuple):
    """A process is reaped and nothing it left is alive; `strays` were ended on the way."""

    id: int
    name: str
    pid: int
    exit: Exit
    strays: list[Frame]
    mine: bool


Event = Spawned | SpawnFailed | WorkerExited | Stopped | StraysLeft | Note | Gone


class KeeperClient:
    """The socket to a keeper. Owns it, and the keeper's pidfd when this process started it.

    A program also owns the record of the run that its keeper is the other holder of.
    """

    def __init__(
        self, sock: socket.socket, ref: ProcessRef | None, record: Record | None = None
    ) -> None:
        self.channel = Channel(sock)
        self.ref = ref
        self.record = record
        self._last_id = 0
        self._ending = threading.Lock()

    @classmethod
    def launch(cls, record: Record) -> KeeperClient:
        """Start a keeper as a child of this process, in a session of its own.

        Nothing of this interpreter is touched: no handler, no subreaper flag, no start method.
        """
        record_fd = CONTROL_FD + 1 if record.fd >= 0 else -1
        sources: list[int] = []
        ours = theirs = pid = None
        try:
            ours, theirs = socket.socketpair()
            handed_on = [fd for fd in (theirs.fileno(), record.fd) if fd >= 0]
            sources.extend(dup_high(fd, CONTROL_FD + 1) for fd in handed_on)
            me = os.getpid(), own_start()
            argv = [
                sys.executable,
                *("-I", "-S", os.path.join(_HERE, "_keeper.py")),
                *map(str, (CONTROL_FD, record_fd, *me, record.run_id, record.path)),
            ]
            pid = os.posix_spawn(
                argv[0],
                argv,
                os.environ,  # noqa: TID251  (passed on, not read)
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, source, CONTROL_FD + i)
                    for i, source in enumerate(sources)
                ],
                setsid=True,
                setsigmask=(),
                setsigdef=[
                    number for number in signal.valid_signals() if number not in _UNCATCHABLE
                ],
            )
            return cls(ours, ProcessRef.open(pid), record)
        except BaseException:
            if ours is not None:
                ours.close()  # at whose end a keeper leaves
            if pid is not None:
                _see_off(pid)
            record.remove()
            raise
        finally:
            for source in sources:
                os.close(source)
            if theirs is not None:
                theirs.close()

    @classmethod
    def inherited(cls, fd: int) -> KeeperClient:
        """Use the keeper socket that this process was born with."""
        return cls(socket.socket(fileno=fd), None)

    def spawn(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        fds: Mapping[int, int],
        *,
        worker: bool = True,
        keeper_fd: int | None = None,
        lifeline_fd: int | None = None,
        ignore: Sequence[int] = (),
        new_session: bool = True,
        fork: Frame | None = None,
    ) -> int:
        """Ask for a process; the answer comes as `Spawned` or `SpawnFailed` with this id.

        `fds` maps the child's numbers to ours. A *worker* gets the keeper's pid as its last
        argument and /dev/null as stdin; any other command keeps the keeper's stdin. It finds a
        socket to the keeper as `keeper_fd`, and as `lifeline_fd` what ends when the keeper does.
        Signals in `ignore` stay ignored. With `fork` (see `_handshake.fork_frame`) it is born of a
        zygote where that is possible.
        """
        self._last_id += 1
        frame = {
            "op": "spawn",
            "id": self._last_id,
            "name": name,
            "argv": list(argv),
            "env": dict(env),
            "fds": list(fds),
            "keeper_fd": keeper_fd,
            "lifeline_fd": lifeline_fd,
            "worker": worker,
            "ignore": list(ignore),
            "new_session": new_session,
            "fork": fork,
        }
        self._send(frame, list(fds.values()))
        return self._last_id

    def cancel(self, ident: int) -> None:
        """Call off what was asked for as `ident`; nothing when it is born by now."""
        self._send({"op": "cancel", "id": ident})

    def signal_child(self, ident: int, number: int, *, group: bool) -> None:
        """Have the keeper signal the process asked for as `ident`, or its process group."""
        self._send({"op": "signal", "id": ident, "signal": number, "group": group})

    def signal_tree(self, number: int) -> None:
        """Have the keeper signal everything below it, and what comes to it from now on."""
        self._send({"op": "tree", "signal": number})

    def _send(self, frame: Frame, fds: Sequence[int] = ()) -> None:
        try:
            self.channel.send(frame, fds)
        except BrokenPipeError as error:
            raise KeeperDied("the keeper is gone: nothing can be started or signalled") from error

    def events(self) -> list[Event]:
        """Read what the keeper has said; `channel.eof` tells when it is gone."""
        return [_event(frame, fds) for frame, fds in self.channel.receive()]

    def go_on(self) -> None:
        """Continue a keeper that somebody has stopped."""
        if self.ref is not None and self.ref.fileno() >= 0:
            self.ref.send(signal.SIGCONT)

    def close(self, by: Deadline | None = None) -> bool:
        """Leave the keeper, which then ends whatever of ours is alive and leaves too.

        Waits for it for at most a second, or until `by`; whether there is nothing more to wait
        for. One that keeps an unkillable process stays with it: called again, this reaps it.
        """
        with contextlib.suppress(BrokenPipeError, ProtocolError):
            self.channel.send({"op": "bye"})
        self.channel.close()
        gone = True
        if self.ref is not None and self.ref.fileno() >= 0:  # goes on after an interrupt
            self.go_on()  # one that is stopped does not hear us
            gone = self.ref.dead(wait_s=_LEAVE_S if by is None else min(_LEAVE_S, by.left_s()))
            if gone:
                reap(self.ref)
                self.end_left(by)
                self.ref.close()
        if gone and self.record is not None:
            self.record.close()
        return gone

    def end_left(self, by: Deadline | None = None) -> None:
        """End what an own keeper, killed, can no longer end; safe from any thread, and twice.

        What has not ended by then stays in the record, for the next start.
        """
        left_s = _END_LEFT_S if by is None else min(_END_LEFT_S, by.left_s())
        if self.record is None or not self._ending.acquire(timeout=left_s):
            return  # another thread is at it
        try:
            from stopbath.lifecycle._sweep import sweep_own  # `run` has no use for it

            sweep_own(self.record, left_s)
        finally:
            self._ending.release()

    def abandon(self) -> None:
        """In a forked child: close the copies of what is the parent's."""
        self.channel.close()
        if self.ref is not None:
            self.ref.close()
        if self.record is not None:
            self.record.close()  # a child that held it would keep the run alive


_LEAVE_S = 1.0  # for a keeper to end what is left
_END_LEFT_S = 2.0  # for what a killed one could not
_UNCATCHABLE = {signal.SIGKILL, signal.SIGSTOP}


def _see_off(pid: int) -> None:
    """Reap a keeper that could not be taken hold of for want of a descriptor; there is one now."""
    with contextlib.suppress(OSError):  # still none, or reaped by the program: it leaves anyway
        ref = ProcessRef.open(pid)
        if ref.dead(wait_s=_LEAVE_S):
            reap(ref)
        ref.close()


_OF_LIFE: dict[str, Callable[[int, Frame], Event]] = {
    "strays": lambda ident, it: StraysLeft(ident, it["left"], it["mine"]),
    "stopped": lambda ident, it: Stopped(ident, it["mine"]),
    "note": lambda _, it: Note(str(it["what"]), it["mine"]),
    "exited": lambda ident, it: WorkerExited(ident, it["name"], it["pid"], _end(it), it["mine"]),
    "gone": lambda ident, it: Gone(
        ident, it["name"], it["pid"], _end(it), it["strays"], it["mine"]
    ),
}


def _event(frame: Frame, fds: list[int]) -> Event:
    kind, ident = frame["ev"], frame.get("id", 0)
    if kind == "spawned":
        ref = ProcessRef(frame["pid"], fds[0], frame["start"])
        return Spawned(ident, frame["name"], ref, frame["mine"])
    if kind == "failed":
        return SpawnFailed(ident, frame["errno"], frame["why"], frame["mine"])
    return _OF_LIFE[kind](ident, frame)


def _end(frame: Frame) -> Exit:
    return Exit(frame["code"], frame["signal"])
