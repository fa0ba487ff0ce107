"""The runs that records tell of, and which of them are dead."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from typing import TYPE_CHECKING, Any, NamedTuple

from stopbath.lifecycle._registry import SUFFIX, directories, lock, open_directory, unlink

if TYPE_CHECKING:
    from stopbath.lifecycle._registry import Record

__all__ = ["Claim", "Identity", "Run", "registered"]


class Identity(NamedTuple):
    """A process that belongs to a run: its part, its name, and what makes its pid unique."""

    role: str  # guardian, program, keeper or worker
    name: str
    pid: int
    start: int  # clock ticks since boot

    @property
    def ours(self) -> bool:
        """Whether stopbath started it; the program of the library face is its user's."""
        return self.role != "program"


class Run(NamedTuple):
    """What a record says. `host` is the kernel and PID namespace its numbers mean something in."""

    path: str
    run_id: str
    kind: str  # serve, run or library
    name: str
    argv: tuple[str, ...]
    host: str
    started_at: str
    processes: tuple[Identity, ...]
    resources: tuple[dict[str, Any], ...]
    live: bool


class Claim:
    """A dead run, taken by this process for as long as it holds the lock that was free."""

    __slots__ = ("_fd", "run")

    def __init__(self, run: Run, fd: int) -> None:
        self.run, self._fd = run, fd

    @classmethod
    def of(cls, record: Record) -> Claim:
        """Take over an own run whose keeper was killed."""
        claim = cls(_parse(record.path, record.fd, live=False), record.fd)
        record.fd = -1
        return claim

    def forget(self) -> None:
        """Remove the record, and let go."""
        unlink(self.run.path)
        self.close()

    def close(self) -> None:
        """Let go; the record stays for the next sweep."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def registered(*, claim_dead: bool = False) -> tuple[list[Run], list[Claim]]:
    """Read every record: the runs, and, when asked, a claim on each dead one.

    Another sweep's claim makes a dead run look alive here, which is as it should be. A file
    that is not ours, or not a record, is passed over.
    """
    runs: list[Run] = []
    claims: list[Claim] = []
    for where in directories():
        try:
            directory = open_directory(where, make=False)
        except OSError:
            continue
        try:
            for name in sorted(os.listdir(directory)):
                if name.endswith(SUFFIX):
                    _look(where, name, directory, runs, claims if claim_dead else None)
        finally:
            os.close(directory)
    return runs, claims


def _look(
    where: str, name: str, directory: int, runs: list[Run], claims: list[Claim] | None
) -> None:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=directory)
    except OSError:
        return
    keep = False
    try:
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1:
            # Those who only look must not make a dead run look alive to each other.
            live = not lock(fd, fcntl.LOCK_SH if claims is None else fcntl.LOCK_EX)
            run = _parse(os.path.join(where, name), fd, live=live)
            runs.append(run)
            if claims is not None and not live:
                claims.append(Claim(run, fd))
                keep = True
    finally:
        if not keep:
            os.close(fd)


def _parse(path: str, fd: int, *, live: bool) -> Run:
    """Read a record; lines that a crash or a full disk cut short are passed over."""
    head: dict[str, Any] = {}
    processes: dict[tuple[int, int], Identity] = {}
    resources: list[dict[str, Any]] = []
    with open(os.dup(fd), "rb") as file:
        file.seek(0)
        for line in file:
            try:
                facts = json.loads(line)
                kind = facts.pop("t")
                if kind == "run":
                    head = facts
                elif kind == "process":
                    one = Identity(**facts)
                    processes[one.pid, one.start] = one
                elif kind == "resource":
                    resources.append(facts)
            except (ValueError, TypeError, KeyError, AttributeError):
                continue
    return Run(
        path=path,
        run_id=str(head.get("run_id", "")),
        kind=str(head.get("kind", "?")),
        name=str(head.get("name", "?")),
        argv=tuple(map(str, head.get("argv", ()))),
        host=str(head.get("host", "?")),
        started_at=str(head.get("started_at", "")),
        processes=tuple(processes.values()),
        resources=tuple(resources),
        live=live,
    )
