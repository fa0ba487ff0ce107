"""Processes by identity. Every signal and wait system call of this project is here."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import struct
from typing import TYPE_CHECKING, NamedTuple

from stopbath.lifecycle._errors import Exit

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "STOP_SIGNALS",
    "Arrival",
    "ProcessRef",
    "SignalQueue",
    "arm_parent_death",
    "become_subreaper",
    "catches",
    "children",
    "children_of",
    "descendants",
    "die",
    "die_with_group",
    "dup_high",
    "memory_gib",
    "own_start",
    "peek_exit",
    "read_stat",
    "reap",
    "reap_pid",
    "signal_group_of",
    "stop_self",
    "stopped",
    "tree_of",
]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""By which a person, a terminal or a service manager asks for a stop."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


class Arrival(NamedTuple):
    """A signal that arrived: its number, who sent it (0: the kernel, a terminal)."""

    number: int
    sender: int


class SignalQueue:
    """Signals as readable events (signalfd(2)), with their senders. Blocks what it receives.

    No handler runs, so nothing is interrupted and nothing depends on which bytecode is next.
    """

    _SI_KERNEL = 0x80
    _SIZE = 128  # struct signalfd_siginfo

    def __init__(self, numbers: Iterable[int]) -> None:
        mask = 0
        for number in numbers:
            mask |= 1 << (number - 1)
        signal.pthread_sigmask(signal.SIG_BLOCK, tuple(numbers))
        raw = ctypes.c_uint64(mask)
        self._fd = _libc.signalfd(-1, ctypes.byref(raw), os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    def fileno(self) -> int:
        """Give the descriptor, for a selector."""
        return int(self._fd)

    def read(self) -> list[Arrival]:
        """Read what has arrived; equal signals that are pending together count once."""
        found: list[Arrival] = []
        while True:
            try:
                data = os.read(self._fd, self._SIZE * 16)
            except BlockingIOError:
                return found
            for at in range(0, len(data), self._SIZE):
                number, _, code, pid = struct.unpack_from("=IiiI", data, at)
                found.append(Arrival(number, 0 if code == self._SI_KERNEL else pid))


class Stat(NamedTuple):
    """What `/proc/PID/stat` says of a process; `start` is in clock ticks since boot."""

    name: str
    state: str
    ppid: int
    pgid: int
    session: int
    start: int


def read_stat(pid: int | str) -> Stat | None:
    """Read `/proc/PID/stat`; None when there is no such process."""
    try:
        return _stat(pid)
    except OSError:
        return None


def own_start() -> int:
    """Give this process's start time; `OSError` without /proc, or without a descriptor left."""
    return _stat("self").start


def _stat(pid: int | str) -> Stat:
    with open(f"/proc/{pid}/stat", "rb") as file:  # pathlib costs the keeper 1 MB
        # The command name stands in parentheses and may hold spaces and parentheses itself.
        head, _, tail = file.read().rpartition(b")")
    fields = tail.split()
    name = head.partition(b"(")[2].decode("utf-8", "replace")
    ids = (int(fields[i]) for i in (1, 2, 3, 19))
    return Stat(name, fields[0].decode(), *ids)


class ProcessRef:
    """One process, held by pidfd and start time, so that its number can never mean another.

    Owns the pidfd. Works for any process of the same user, not only for children
    (pidfd_open(2): poll reports the end of any process).
    """

    __slots__ = ("_fd", "pid", "start")

    def __init__(self, pid: int, fd: int, start: int) -> None:
        self.pid, self._fd, self.start = pid, fd, start

    @classmethod
    def open(cls, pid: int, start: int | None = None) -> ProcessRef:
        """Take hold of a process; `ProcessLookupError` when it is gone or is another by now.

        `start` is the start time it must have; the check comes after the pidfd is open, so
        that a pid that changed hands in between is noticed.
        """
        fd = os.pidfd_open(pid)
        stat = read_stat(pid)
        if stat is None or (start is not None and stat.start != start):
            os.close(fd)
            raise ProcessLookupError(f"process {pid} is gone")
        return cls(pid, fd, stat.start)

    def fileno(self) -> int:
        """Give the pidfd; readable once the process is dead, reaped or not."""
        return self._fd

    def send(self, number: int) -> bool:
        """Send a signal; False when the process is gone already."""
        try:
            signal.pidfd_send_signal(self._fd, number)
        except ProcessLookupError:
            return False
        return True

    def try_send(self, number: int) -> bool:
        """Send a signal where not being allowed to is an answer, too; False: it did not arrive.

        A command may start what is another user's: by sudo, or by a setuid program.
        """
        try:
            return self.send(number)
        except PermissionError:
            return False

    def dead(self, wait_s: float = 0.0) -> bool:
        """Say whether the process is dead (a zombie is), waiting at most `wait_s` for it."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(wait_s * 1000))

    def close(self) -> None:
        """Let go of the process."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __repr__(self) -> str:
        return f"<ProcessRef {self.pid} started {self.start}>"


def peek_exit(ref: ProcessRef) -> Exit | None:
    """Read how a dead child ended and leave the zombie, which keeps its pid and group taken."""
    result = os.waitid(os.P_PIDFD, ref.fileno(), os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return None if result is None else Exit.from_wait(result.si_code, result.si_status)


def reap(ref: ProcessRef) -> None:
    """Reap a dead child; one that somebody else has reaped is as good."""
    try:
        os.waitid(os.P_PIDFD, ref.fileno(), os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return


def reap_pid(pid: int) -> Exit | None:
    """Reap the zombie child `pid`; a child's pid is not reused before that."""
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None
    return None if result is None else Exit.from_wait(result.si_code, result.si_status)


def stopped(ref: ProcessRef) -> bool:
    """Whether a child has been stopped since this was last asked (job control)."""
    try:
        return os.waitid(os.P_PIDFD, ref.fileno(), os.WSTOPPED | os.WNOHANG) is not None
    except ChildProcessError:
        return False


def signal_group_of(ref: ProcessRef, number: int) -> None:
    """Signal the process group that an own child leads, or led: not reaped, it holds the number."""
    try:
        os.killpg(ref.pid, number)  # noqa: TID251  (the one place that may)
    except (ProcessLookupError, PermissionError):
        return


def catches(ref: ProcessRef, number: int) -> bool:
    """Whether a process has a handler for a signal, as `/proc` shows it now."""
    try:
        with open(f"/proc/{ref.pid}/status", "rb") as file:
            mask = file.read().partition(b"\nSigCgt:")[2].split()[0]
    except (OSError, IndexError):
        return False
    return bool(int(mask, 16) >> (number - 1) & 1) and not ref.dead()


def children() -> list[int]:
    """List the children of this single-threaded process, zombies and adopted ones included."""
    return children_of(os.getpid())


def children_of(pid: int) -> list[int]:
    """List the children of a process's first thread, by number alone: of others, to look at."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            return [int(word) for word in file.read().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        found = []
        for name in os.listdir("/proc"):
            stat = read_stat(name) if name.isdigit() else None
            if stat is not None and stat.ppid == pid:
                found.append(int(name))
        return found


def tree_of(pid: int) -> list[int]:
    """List the living processes below `pid`, nearest first, by number alone: to look at them."""
    below: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        stat = read_stat(name) if name.isdigit() else None
        if stat is not None and stat.state not in "ZX":
            below.setdefault(stat.ppid, []).append(int(name))
    line = list(below.get(pid, ()))
    for child in line:
        line += below.get(child, ())
    return line


def descendants(pid: int) -> list[ProcessRef]:
    """Take hold of every process below `pid`, nearest first; the caller owns the references.

    A snapshot: what forks meanwhile is found in the next one.
    """
    found: list[ProcessRef] = []
    below: dict[int, list[tuple[int, int]]] = {}
    for name in os.listdir("/proc"):
        stat = read_stat(name) if name.isdigit() else None
        if stat is not None and stat.state != "Z":
            below.setdefault(stat.ppid, []).append((int(name), stat.start))
    line = list(below.get(pid, ()))
    for child, start in line:
        line += below.get(child, ())
        try:
            found.append(ProcessRef.open(child, start))
        except ProcessLookupError:
            continue
    return found


def memory_gib(pid: int) -> float:
    """Resident memory in GiB; 0 when it cannot be read."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
    except (OSError, IndexError):
        return 0.0


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def arm_parent_death(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process `number` when its parent ends (prctl(2)).

    Cleared by fork and by any change of uid or gid; fires on the end of the parent's *thread*.
    """
    _prctl(_PR_SET_PDEATHSIG, number)


def become_subreaper() -> None:
    """Make this process the one to which orphaned descendants come back (prctl(2))."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die() -> None:
    """End this process as SIGKILL would, because it does."""
    signal.raise_signal(signal.SIGKILL)


def die_with_group() -> None:
    """End this process and, where it leads its process group, its plain children with it."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # noqa: TID251  (its own group, and nobody else's)
    die()


def stop_self() -> None:
    """Stop this process as Ctrl-Z would; returns when it is continued."""
    signal.raise_signal(signal.SIGSTOP)


def dup_high(fd: int, above: int = 2) -> int:
    """Duplicate to a number `above` those to which descriptors are laid out for a child."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above + 1)
