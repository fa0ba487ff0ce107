"""What a command's tree owns outside of its processes, as the kernel tells while it lives.

A file in /dev/shm is its own when it was born during the run and a process of the tree, and
nobody else, had it open or mapped when it was first seen; a socket file when the kernel's table
has a socket of the tree bound to it; a pid or lock file when it is open in the tree, or names a
process of it. Identity is name, device and inode: another file under the same name is another.
"""

from __future__ import annotations

import ctypes
import os
import stat
import time
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

__all__ = [
    "SHM",
    "Before",
    "Belonging",
    "Held",
    "bound_by",
    "bound_sockets",
    "descriptors_of",
    "everybody",
    "held_by",
    "pid_files",
    "shared_memory",
    "socket_at",
    "socket_inode",
    "sockets_of",
]

SHM = "/dev/shm"  # noqa: S108  (where the kernel has it)
_LOCKS = (".pid", ".lock", ".lck")
_MOST_ENTRIES = 2000  # looked at in one directory
_IN_CREATE, _IN_MOVED_TO = 0x100, 0x80
_libc = ctypes.CDLL(None, use_errno=True)
_PID_DIRS = ("/run", "/run/lock", "/tmp")  # noqa: S108  (looked at, not written to)

T = TypeVar("T")
Ident = tuple[int, int]  # device, inode


class Belonging(NamedTuple):
    """One thing: `kind` is shm, socket or lock."""

    kind: str
    path: str
    dev: int
    ino: int


class Held:
    """What processes were seen to hold."""

    __slots__ = ("files", "hidden", "locks", "sockets")

    def __init__(self) -> None:
        self.files: set[Ident] = set()  # of /dev/shm
        self.sockets: dict[int, int] = {}  # inode of the socket: a process that has it
        self.locks: list[Belonging] = []
        self.hidden = False  # whether somebody could not be looked at


class Before(NamedTuple):
    """What there is before the command starts; `births` tells of files born in /dev/shm since.

    `births` is an inotify descriptor, -1 where there is none; `born_ns` is the wall clock's.
    """

    shm: frozenset[Ident]
    sockets: frozenset[str]
    born_ns: int
    births: int

    @classmethod
    def now(cls) -> Before:
        """Look, and have the kernel tell from now on; the caller owns `births`."""
        births = _watch(SHM)
        old = frozenset(shared_memory()), frozenset(bound_sockets().values())
        return cls(*old, time.time_ns(), births)  # compared with what files say of themselves, once


def _watch(directory: str) -> int:
    """Have the kernel tell of every file that is born; -1 where it does not."""
    fd: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd >= 0 and _libc.inotify_add_watch(fd, directory.encode(), _IN_CREATE | _IN_MOVED_TO) < 0:
        os.close(fd)
        return -1
    return fd


def shared_memory() -> dict[Ident, str]:
    """List the files in /dev/shm, semaphores included."""
    found: dict[Ident, str] = {}
    try:
        with os.scandir(SHM) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    about = entry.stat(follow_symlinks=False)
                    found[about.st_dev, about.st_ino] = entry.path
    except OSError:
        return found  # no /dev/shm, or one that changes under our hands
    return found


def bound_sockets() -> dict[int, str]:
    """Read the kernel's table of unix sockets: inode of the socket, path it is bound to."""
    found: dict[int, str] = {}
    try:
        with open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                fields = line.rstrip("\n").split(maxsplit=7)
                if len(fields) > 7 and not fields[7].startswith("@") and fields[6].isdecimal():  # noqa: PLR2004  (the columns of proc(5))
                    found[int(fields[6])] = fields[7]
    except OSError:
        return found
    found.pop(0, None)  # a connection nobody has accepted yet
    return found


def everybody() -> list[int]:
    """List every process of this host."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def held_by(pids: Iterable[int], go_on: Callable[[], bool] = lambda: True) -> Held:
    """Look at what processes hold, for as long as `go_on()`."""
    held = Held()
    for pid in pids:
        if not go_on():
            held.hidden = True
            break
        try:
            _read_maps(pid, held)
            _read_fds(pid, held)
        except PermissionError:
            held.hidden = True
        except OSError:
            continue  # has ended
    return held


def _read_maps(pid: int, held: Held) -> None:
    with open(f"/proc/{pid}/maps", "rb") as file:
        data = file.read()
    if b"/dev/shm/" not in data:
        return
    for line in data.split(b"\n"):
        if b" /dev/shm/" in line:
            _, _, _, device, inode, _ = line.split(None, 5)
            major, _, minor = device.partition(b":")
            held.files.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))


def _read_fds(pid: int, held: Held) -> None:
    for where, target in descriptors_of(pid):
        inode = socket_inode(target)
        try:
            if inode is not None:
                held.sockets.setdefault(inode, pid)
            elif target.startswith(SHM):
                about = os.stat(where)
                held.files.add((about.st_dev, about.st_ino))
            elif target.endswith(_LOCKS) and target.startswith("/"):
                about = os.stat(where)
                if stat.S_ISREG(about.st_mode):
                    held.locks.append(Belonging("lock", target, about.st_dev, about.st_ino))
        except FileNotFoundError:
            continue  # closed meanwhile


def descriptors_of(pid: int) -> Iterator[tuple[str, str]]:
    """Give where /proc has each descriptor of a process, and what it is open on."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        where = f"/proc/{pid}/fd/{name}"
        try:
            target = os.readlink(where)
        except FileNotFoundError:
            continue  # closed meanwhile
        yield where, target


def socket_inode(target: str) -> int | None:
    """Read the inode of a socket from what a descriptor is open on; None for anything else."""
    return int(target[8:-1]) if target.startswith("socket:[") else None


def bound_by(
    owners: Mapping[int, T], table: Mapping[int, str], old: Collection[str]
) -> dict[str, T]:
    """Give the paths that sockets of `owners` (by inode) are bound to, each with its owner.

    Not one that was bound before the run, nor one that somebody else has a socket of, too.
    """
    others = {path for inode, path in table.items() if inode not in owners}
    return {
        path: owners[inode]
        for inode, path in table.items()
        if inode in owners and path not in others and path not in old
    }


def socket_at(path: str) -> Belonging | None:
    """Give the socket file at a path; None when its owner has removed it."""
    try:
        about = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISSOCK(about.st_mode):
        return None
    return Belonging("socket", path, about.st_dev, about.st_ino)


def sockets_of(held: Held, table: dict[int, str], old: Collection[str]) -> list[Belonging]:
    """Give the socket files that the holders have bound, and nobody else, since the run began."""
    found = []
    for path, pid in bound_by(held.sockets, table, old).items():
        try:
            full = path if path.startswith("/") else f"{os.readlink(f'/proc/{pid}/cwd')}/{path}"
        except OSError:
            continue  # has ended
        there = socket_at(full)
        if there is not None:
            found.append(there)
    return found


def pid_files(pids: Collection[int], directories: Iterable[str] = ()) -> list[Belonging]:
    """Find the files, called like pid or lock files, that hold the number of one of `pids`."""
    found = []
    for directory in dict.fromkeys((*_PID_DIRS, *directories)):
        try:
            with os.scandir(directory) as entries:
                for _, entry in zip(range(_MOST_ENTRIES), entries, strict=False):
                    if entry.name.endswith(_LOCKS) and entry.is_file(follow_symlinks=False):
                        about = entry.stat(follow_symlinks=False)
                        if _names_one_of(entry.path, pids):
                            found.append(Belonging("lock", entry.path, about.st_dev, about.st_ino))
        except OSError:
            continue
    return found


def _names_one_of(path: str, pids: Collection[int]) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        words = os.read(fd, 32).split()
    except OSError:
        return False
    finally:
        os.close(fd)
    return len(words) == 1 and words[0].isdigit() and int(words[0]) in pids
