"""One worker as its supervisor holds it: identity, sockets, last words, what was done to it."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

from stopbath.lifecycle._channel import Channel, Frame
from stopbath.lifecycle._escalation import Action
from stopbath.lifecycle._handshake import go_frame, payload_of
from stopbath.lifecycle._report import Outcome, StepTaken, Survivor, WorkerReport
from stopbath.lifecycle._spawn import CONTROL_FD, KeeperClient
from stopbath.lifecycle._state import TRANSITIONS, WorkerEvent, WorkerState, next_state

if TYPE_CHECKING:
    from stopbath.lifecycle._errors import Exit
    from stopbath.lifecycle._process import ProcessRef
    from stopbath.lifecycle._spec import WorkerSpec

__all__ = ["Member"]

_CHILD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_child.py")
_STDERR_FD, _KEEPER_FD, _FIRST_FD = 2, 4, 10
_PIPE_BYTES = 1 << 20  # a 64 KiB pipe freezes a chatty worker while we are stopped
_KEPT_LINES, _LINE_BYTES = 64, 2000
_TURN_BYTES = 1 << 20  # read at a time, so that a worker that floods cannot starve the others


class Member:
    """The record of one worker. Lives on the supervisor's thread; others only read fields."""

    def __init__(self, spec: WorkerSpec, name: str, rank: int) -> None:
        self.spec, self.name, self.rank = spec, name, rank
        self.state = WorkerState.CREATED
        self.spawn_id = 0
        self.ref: ProcessRef | None = None
        self.pid: int | None = None
        self.channel: Channel | None = None
        self.stderr_fd = -1
        self.exit: Exit | None = None
        self.status_due: float | None = None  # dead by its pidfd; until when to wait for its status
        self.info: Any = None
        self.phase = "being spawned"
        self.started_at = 0.0
        self.heard_at = 0.0
        self.ended_at: float | None = None
        self.budget_s = 0.0  # how long its own orderly stop may take, as it announced
        self.reports: list[Frame] = []
        self.sent: Action | None = None
        self.steps: list[tuple[Action, float, str | None]] = []
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._partial = b""
        self._child_fds: list[int] = []

    @property
    def alive(self) -> bool:
        """Whether there is, or will be, a process that has not ended."""
        return self.state not in {WorkerState.CREATED, WorkerState.EXITED, WorkerState.GONE}

    def move(self, event: WorkerEvent) -> None:
        """Take the transition that the table has for `event`."""
        self.state = next_state(TRANSITIONS, f"worker {self.name}", self.state, event)

    # -- birth

    def ask_for(self, keeper: KeeperClient, now: float) -> None:
        """Make the sockets and ask the keeper for the process; `OSError` when it cannot be."""
        self.move(WorkerEvent.SPAWN)
        self.started_at = self.heard_at = now
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self.stderr_fd, write_end = os.pipe()
        try:
            os.set_blocking(self.stderr_fd, False)
            _enlarge(self.stderr_fd)
            fds = {CONTROL_FD: theirs.fileno(), _STDERR_FD: write_end}
            fds |= {_FIRST_FD + i: fd for i, fd in enumerate(self.spec.fds.values())}
            keeper_fd = _KEEPER_FD if self.spec.keeper_access else None
            kept = sorted({*fds, *([_KEEPER_FD] if keeper_fd else [])} - {_STDERR_FD})
            argv = [sys.executable, "-I", "-S", _CHILD, self.name, str(CONTROL_FD)]
            self.spawn_id = keeper.spawn(
                self.name,
                [*argv, ",".join(map(str, kept))],
                {**os.environ, **self.spec.env},  # noqa: TID251  (passed on, not read)
                fds,
                keeper_fd=keeper_fd,
            )
        finally:
            theirs.close()
            os.close(write_end)

    def born(self, ref: ProcessRef) -> None:
        """The pidfd is here: the child may go on."""
        self.move(WorkerEvent.SPAWNED)
        self.ref, self.pid = ref, ref.pid
        self.phase = "starting"

    def let_go_on(self) -> None:
        """Send the target; errors mean that the child is dead, which its pidfd tells too."""
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

    # -- words

    def read_stderr(self) -> bytes:
        """Read what the pipe holds, never waiting and never to EOF: strays hold it open.

        Gives whole lines to be forwarded; closes the pipe when every writer is gone.
        """
        data = bytearray()
        while self.stderr_fd >= 0 and len(data) < _TURN_BYTES:
            try:
                chunk = os.read(self.stderr_fd, 65536)
            except BlockingIOError:
                break
            if not chunk:
                self.close_stderr()
            data += chunk
        whole, newline, rest = (self._partial + data).rpartition(b"\n")
        self._partial = rest[-_LINE_BYTES:]
        lines = whole.split(b"\n") if newline else []
        if self.stderr_fd < 0 and self._partial:
            lines.append(self._partial)
            self._partial = b""
        self.lines.extend(
            line[:_LINE_BYTES].decode("utf-8", "replace") for line in lines[-_KEPT_LINES:]
        )
        prefix = f"[{self.name}] ".encode() if self.spec.prefix else b""
        return b"".join(prefix + line + b"\n" for line in lines)

    def last_words(self) -> tuple[str, ...]:
        """Give the last stderr lines, an unfinished one included."""
        unfinished = [self._partial.decode("utf-8", "replace")] if self._partial else []
        return (*self.lines, *unfinished)[-_KEPT_LINES:]

    def close_stderr(self) -> None:
        """Close the pipe; the supervisor has taken it out of its selector."""
        fd, self.stderr_fd = self.stderr_fd, -1
        if fd >= 0:
            os.close(fd)

    # -- end

    def act(self, action: Action, now: float, within_s: float) -> None:
        """Do one step of a stop to this worker; an error is recorded, never raised.

        A worker that is not ready has nothing to drain, and one whose control socket fails
        cannot be asked: both go on to SIGTERM at once.
        """
        if self.sent is not None and self.sent >= action:
            return
        if action is Action.DRAIN and self.state is not WorkerState.READY:
            action = Action.SIGTERM
        self.move(WorkerEvent.STOP)
        if self.ref is None:  # not born yet: stopped as soon as the pid is known
            return
        error = self._perform(action, within_s)
        self.sent = action
        self.steps.append((action, now, error))
        if error is not None and action is Action.DRAIN:
            self.act(Action.SIGTERM, now, within_s)

    def _perform(self, action: Action, within_s: float) -> str | None:
        assert self.ref is not None
        try:
            if action is Action.SIGKILL:
                self.ref.send(signal.SIGKILL)
                return None
            if action is Action.SIGTERM:
                self.ref.send(signal.SIGTERM)
                self.ref.send(signal.SIGCONT)  # a stopped process does not see it otherwise
            if self.channel is None or self.channel.eof:
                return "the control socket is closed"
            self.channel.send({"t": "stop", "action": int(action), "within_s": within_s})
        except Exception as error:  # an error on one worker never stops the others
            return repr(error)
        return None

    def close(self) -> None:
        """Let go of everything; the supervisor has taken it out of its selector."""
        if self.channel is not None:
            self.channel.close()
        self.close_stderr()
        if self.ref is not None:
            self.ref.close()

    # -- account

    def outcome(self) -> Outcome:
        """Name the step that ended it."""
        if self.alive:
            return "survived"
        if self.sent is Action.SIGKILL:
            return "killed"
        if self.sent is Action.SIGTERM:
            return "terminated"
        asked = self.sent is Action.DRAIN and (self.exit is None or self.exit.code == 0)
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
            self.last_words(),
        )

    def survivor(self) -> Survivor:
        """Say what /proc knows of why it is still alive; reads only files that cannot block."""
        assert self.pid is not None
        last = self.sent.step if self.sent else "none"
        return survivor_of(self.pid, self.name, last)


def survivor_of(pid: int, name: str, last_step: str) -> Survivor:
    """Collect evidence about a process that will not end.

    `stat`, `wchan` and `status` do not take the memory map's lock, which a stuck process may
    hold; `cmdline`, `maps` and `environ` do, and are left alone.
    """
    evidence = {name: _proc(pid, name) for name in ("wchan", "syscall", "status")}
    status = dict(
        line.split(":\t", 1) for line in evidence.pop("status").splitlines() if ":\t" in line
    )
    evidence |= {key: status[key].strip() for key in ("VmRSS", "Threads") if key in status}
    state = status.get("State", "unknown").strip()
    return Survivor(pid, name, state, evidence["wchan"], last_step, evidence)


def _proc(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/{name}", encoding="utf-8", errors="replace") as file:
            return file.read(4096).strip()
    except OSError as error:
        return f"unreadable: {error.strerror}"


def _enlarge(fd: int) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    except OSError:
        return  # over the user's pipe limit: the default size works, only with less slack


def forward(data: bytes, fd: int = 2) -> None:
    """Write to our stderr what it takes without blocking; the rest is dropped.

    A terminal stopped by Ctrl-S or a full pipe must not hold up the supervisor. A pipe that
    polls writable takes PIPE_BUF (4096) bytes (pipe(7)).
    """
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    view = memoryview(data)
    try:
        while view and any(mask & select.POLLOUT for _, mask in poll.poll(0)):
            view = view[os.write(fd, view[:4096]) :]
    except OSError:
        return  # stderr is gone; the lines are kept for the report
