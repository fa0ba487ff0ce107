"""A cgroup of version 2 for each worker, where this host lets us have one.

Subreaping brings everything back that a worker leaves, but has to find and kill it process by
process, in a race with its forks. `cgroup.kill` is one write, atomic against forks. Where there
is no cgroup to be had, everything works without; `stopbath doctor` says what the host gives.

No controller is enabled below our own cgroup, so the rule that inner nodes hold no processes
(cgroups(7)) does not apply to it.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stopbath.lifecycle._registry import Record

__all__ = ["Leaf", "RunCgroup", "freezer_v1", "members", "own_cgroup", "remove_tree"]


def _mounts(kind: str) -> Iterator[tuple[str, str, str]]:
    """Give root, mount point and options of the mounts of a kind (proc_pid_mountinfo(5))."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            front, _, back = line.partition(" - ")
            fields = front.split()
            words = back.split()
            if words and words[0] == kind:
                where = fields[4].replace("\\040", " ").replace("\\011", "\t")
                yield fields[3], where, " ".join((fields[5], *words[2:]))


def own_cgroup() -> str | None:
    """Find the directory of this process's cgroup v2, wherever it is mounted; None without one.

    It may sit beside version 1 (`/sys/fs/cgroup/unified`), and a container may see only a part.
    """
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            mine = next((line[3:].rstrip("\n") for line in file if line.startswith("0::")), None)
        for root, where, _ in _mounts("cgroup2"):
            below = (mine or "").removeprefix(root.rstrip("/"))
            path = where.rstrip("/") + "/" + below.strip("/")
            if mine is not None and ".." not in mine and os.path.isfile(f"{path}/cgroup.procs"):
                return path.rstrip("/")
    except OSError:
        return None
    return None


def freezer_v1() -> str | None:
    """Find where the freezer of version 1 is mounted; it can hold what SIGKILL does not reach."""
    try:
        return next(
            (where for _, where, options in _mounts("cgroup") if "freezer" in options.split(",")),
            None,
        )
    except OSError:
        return None


def members(path: str) -> list[int]:
    """List the processes in a cgroup and in those below it; empty when there is none."""
    found: list[int] = []
    for where, _, _ in os.walk(path):
        with contextlib.suppress(OSError), open(f"{where}/cgroup.procs", "rb") as file:
            found += [int(word) for word in file.read().split()]
    return found


def remove_tree(path: str) -> bool:
    """Remove a cgroup and those below it; False while something in it is not dead and reaped."""
    for where, _, _ in os.walk(path, topdown=False):
        try:
            os.rmdir(where)
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return True


class _Cgroup:
    """One directory, and the descriptor to kill it with: the kill path opens nothing."""

    __slots__ = ("_kill_fd", "path")

    def __init__(self, path: str) -> None:
        self.path, self._kill_fd = path, -1
        if not path:
            return
        os.mkdir(path)
        try:
            self._kill_fd = os.open(f"{path}/cgroup.kill", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:  # a kernel before 5.14
            os.rmdir(path)
            raise

    def kill(self) -> None:
        """Kill everything in it, what is just being forked included. Never raises."""
        with contextlib.suppress(OSError):
            if self._kill_fd >= 0:
                os.write(self._kill_fd, b"1")

    def remove(self) -> bool:
        """Remove it; False while something in it is not dead and reaped."""
        if self.path and not remove_tree(self.path):
            return False
        self.close()
        return True

    def close(self) -> None:
        """Close the descriptor."""
        fd, self._kill_fd = self._kill_fd, -1
        if fd >= 0:
            os.close(fd)


class Leaf(_Cgroup):
    """The cgroup of one worker."""

    __slots__ = ()

    def admit(self, pid: int) -> bool:
        """Put a process in; what it forks from now on is born there."""
        try:
            with open(f"{self.path}/cgroup.procs", "wb", buffering=0) as file:
                file.write(str(pid).encode())
        except OSError:
            return False
        return True


class RunCgroup(_Cgroup):
    """The cgroup of a run, below our own. The keeper is not in it, or it would kill itself.

    Where the host gives none, `path` is empty and nothing here does anything.
    """

    __slots__ = ("_count", "_home_fd", "_inside", "_left")

    def __init__(self, path: str, home_fd: int) -> None:
        super().__init__(path)
        self._home_fd = home_fd
        self._count = 0
        self._inside: Leaf | None = None  # where this process waits for the first birth
        self._left: list[Leaf] = []  # those that could not be removed yet

    @classmethod
    def create(cls, record: Record) -> RunCgroup:
        """Make it, recorded before it exists."""
        own = own_cgroup()
        home_fd = -1
        if own is not None and os.access(own, os.W_OK):
            path = f"{own}/stopbath-{record.run_id}"
            record.note_resource("cgroup", path=path)
            try:
                # Opened first: a process that may leave its cgroup and not return stays there.
                home_fd = os.open(f"{own}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
                return cls(path, home_fd)
            except OSError:
                if home_fd >= 0:
                    os.close(home_fd)
        return cls("", -1)

    def leaf(self) -> Leaf | None:
        """Make the cgroup of one more worker; None when it cannot be."""
        if self._inside is not None:
            return self._inside
        self._count += 1
        if not self.path:
            return None
        try:
            return Leaf(f"{self.path}/{self._count}")
        except OSError:
            return None

    def wait_inside(self) -> None:
        """Go into the first leaf before there is anything to be born in it.

        Moving a process takes the kernel 5 to 15 ms (a grace period of RCU): while the guardian
        imports what it needs, they cost nothing.
        """
        leaf = self.leaf()
        if leaf is not None and leaf.admit(os.getpid()):
            self._inside = leaf

    def kill(self) -> None:
        """Kill everything in it but this process. Never raises."""
        try:
            if self._inside is not None:
                self._go_home()
        except OSError:
            return
        super().kill()

    def _go_home(self) -> None:
        os.write(self._home_fd, b"0")  # 0: whoever writes
        self._inside = None

    @contextlib.contextmanager
    def born_in(self, leaf: Leaf | None) -> Iterator[None]:
        """Have what is started inside the block be born in `leaf`.

        For a program that does not wait to be told: it could fork before it was moved. This
        process goes there and comes back; if it could not come back, nothing here is killed.
        """
        if leaf is None or (leaf is not self._inside and not leaf.admit(os.getpid())):
            yield
            return
        try:
            yield
        finally:
            try:
                self._go_home()
            except OSError:
                leaf.close()
                self.close()

    def bury(self, leaf: Leaf | None) -> None:
        """The worker is reaped: remove its cgroup now, or when what it left is reaped too."""
        if leaf is not None:
            self._left.append(leaf)
            self.tidy()

    def tidy(self) -> None:
        """Try again to remove what was not empty yet."""
        if self._left:
            self._left = [leaf for leaf in self._left if not leaf.remove()]

    def remove(self) -> bool:
        """Remove it with everything below; False while something in it is not dead and reaped."""
        if not super().remove():
            return False
        for leaf in self._left:
            leaf.close()
        fd, self._home_fd = self._home_fd, -1
        if fd >= 0:
            os.close(fd)
        return True
