"""What tests observe from outside: processes by /proc, and what this process holds."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stopbath.lifecycle import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["COOKIE", "FREEZER", "Ledger", "alive", "frozen", "state_of", "wait_until"]

COOKIE = f"STOPBATH_TEST_OF_{os.getpid()}"
"""A variable in the environment of everything that this test run starts, at any distance."""

FREEZER = Path("/sys/fs/cgroup/freezer")


def wait_until(condition: Callable[[], object], by: Deadline, what: str = "") -> None:
    """Look until `condition` holds; only for what /proc shows and no descriptor tells."""
    while not condition():
        assert not by.passed, f"did not come true in time: {what or condition}"
        time.sleep(0.002)


def state_of(pid: int) -> str:
    """Give the state letter of a process; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    return state_of(pid) not in ("", "Z", "X")


def run_processes() -> set[int]:
    """Find what this test run started and what is alive or not reaped, reparented or not."""
    mark = f"{COOKIE}=".encode()
    me = os.getpid()
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == me:
            continue
        try:
            ours = mark in (entry / "environ").read_bytes()
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if ours or parent == me:
            found.add(int(entry.name))
    return found


class Ledger(NamedTuple):
    """What must be equal before and after a test."""

    processes: frozenset[int]
    shared_memory: frozenset[str]
    fds: frozenset[tuple[int, str]]
    threads: frozenset[int]

    @classmethod
    def now(cls) -> Ledger:
        """Look at everything."""
        fds = set()
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (the listing's own is gone below)
            try:
                fds.add((int(name), os.readlink(f"/proc/self/fd/{name}")))  # noqa: PTH115
            except OSError:
                continue
        return cls(
            frozenset(run_processes()),
            frozenset(path.name for path in Path("/dev/shm").iterdir()),
            frozenset(fds),
            frozenset(int(path.name) for path in Path("/proc/self/task").iterdir()),
        )

    def more_than(self, before: Ledger) -> dict[str, set[object]]:
        """Name what is here and was not before."""
        pairs = zip(self._fields, self, before, strict=True)
        return {name: set(mine - theirs) for name, mine, theirs in pairs if mine - theirs}


@contextmanager
def frozen(pid: int) -> Iterator[Callable[[], None]]:
    """Make a process unkillable until it is thawed (cgroup v1 freezer, root); gives the thaw."""
    cgroup = FREEZER / f"stopbath-test-{os.getpid()}-{pid}"
    cgroup.mkdir()

    def thaw() -> None:
        (cgroup / "freezer.state").write_text("THAWED")

    try:
        (cgroup / "cgroup.procs").write_text(str(pid))
        (cgroup / "freezer.state").write_text("FROZEN")
        by = Deadline.after(5)
        wait_until(lambda: "FROZEN" in (cgroup / "freezer.state").read_text().split(), by)
        yield thaw
    finally:
        thaw()
        wait_until(lambda: not _remove(cgroup), Deadline.after(5), "the cgroup is empty")


def _remove(cgroup: Path) -> bool:
    """Whether it is still there."""
    (FREEZER / "cgroup.procs").write_text("0")  # keeps the kernel from a stale task list
    for word in (cgroup / "cgroup.procs").read_text().split():
        try:
            (FREEZER / "cgroup.procs").write_text(word)
        except OSError:
            continue  # has ended meanwhile
    try:
        cgroup.rmdir()
    except OSError:
        return True
    return False
