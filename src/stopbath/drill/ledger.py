"""What must be equal before and after a scenario."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stopbath.lifecycle._containment import own_cgroup
from stopbath.lifecycle._process import read_stat, reap_pid

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["COOKIE", "Ledger", "Place", "records"]

COOKIE = "STOPBATH_DRILL"
"""In the environment of everything a scenario starts, at any distance, unless it is erased."""

_SHM = Path("/dev/shm")  # noqa: S108  (looked at, not written to)
_LISTENING_TCP, _LISTENING_UNIX = "0A", "00010000"


class Place(NamedTuple):
    """Where a scenario plays: its cookie, its runtime directory, what of it is no part of the run.

    `own` are processes of the drill itself (decoys, bystanders), `awaited` children whose end
    the drill wants to see for itself.
    """

    cookie: str
    runtime: Path
    own: set[int]
    awaited: set[int]


class Ledger(NamedTuple):
    """Everything that a fault could leave behind, as words, by column."""

    processes: frozenset[str]
    shared_memory: frozenset[str]
    files: frozenset[str]
    sockets: frozenset[str]
    locks: frozenset[str]
    cgroups: frozenset[str]
    descriptors: frozenset[str]
    threads: frozenset[str]

    @classmethod
    def now(cls, place: Place, held: list[str]) -> Ledger:
        """Look at everything; `held` is what the program under test said it holds too much."""
        pids = _processes(place)
        files = frozenset(_files(place.runtime))
        inodes = _inodes(pids)
        return cls(
            frozenset(f"{pid} {_name(pid)}" for pid in pids),
            frozenset(_shared_memory(set(pids), place.cookie)),
            files,
            frozenset(_listening(inodes)),
            frozenset(_locks(set(_numbers(files)))),
            frozenset(_cgroups(place.runtime)),
            frozenset(it for it in held if it.startswith("fd")),
            frozenset(it for it in held if it.startswith("thread")),
        )

    def more_than(self, before: Ledger) -> dict[str, list[str]]:
        """Name what is here and was not before."""
        pairs = zip(self._fields, self, before, strict=True)
        return {name: sorted(mine - theirs) for name, mine, theirs in pairs if mine - theirs}

    def pids(self) -> list[int]:
        """Give the processes as numbers."""
        return [int(word.split()[0]) for word in self.processes]


def _processes(place: Place) -> list[int]:
    """Find the run's processes by descent from this subreaper and by the cookie they inherit.

    What comes back to this process dead is reaped, as an init does: a zombie counts as left
    behind when somebody else should have reaped it.
    """
    me, mark = os.getpid(), f"{COOKIE}={place.cookie}".encode()
    below: dict[int, list[int]] = {}
    marked: set[int] = set()
    for name in os.listdir("/proc"):  # noqa: PTH208
        stat = read_stat(name) if name.isdigit() else None
        if stat is None:
            continue
        pid = int(name)
        if stat.ppid == me and stat.state == "Z" and pid not in place.awaited:
            reap_pid(pid)
            continue
        below.setdefault(stat.ppid, []).append(pid)
        with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:  # noqa: PTH123
            if mark in file.read().split(b"\0"):
                marked.add(pid)
    line = [pid for pid in below.get(me, ()) if pid not in place.own]
    for pid in line:
        line += below.get(pid, ())
    return sorted((marked | set(line)) - place.own - {me})


def _name(pid: int) -> str:
    with suppress(OSError):
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "?")
        state = read_stat(pid)
        return f"{state.state if state else '?'} {argv.strip()[-60:] or '-'}"
    return "?"


def _files(home: Path) -> Iterator[str]:
    for where, folders, names in os.walk(home):  # what goes meanwhile is passed over
        yield from (f"{where}/{name}" for name in (*folders, *names))


def records(home: Path) -> Iterator[Path]:
    """Give the records of runs below a runtime directory."""
    yield from (Path(file) for file in _files(home) if file.endswith(".run"))


def _numbers(files: frozenset[str]) -> Iterator[int]:
    for file in files:
        with suppress(OSError):
            yield Path(file).stat().st_ino


def _shared_memory(run: set[int], cookie: str) -> Iterator[str]:
    """Give segments of ours that nobody holds, or that the run holds.

    Those that somebody else has open are somebody else's, and so are another scenario's.
    """
    found: dict[str, str] = {}  # by device and inode, as /proc writes them: a name may be another
    with suppress(OSError):
        for path in _SHM.iterdir():
            with suppress(OSError):
                another = path.name.startswith("drill-") and cookie not in path.name
                stat = path.stat()
                if stat.st_uid == os.geteuid() and not another:
                    device = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}"
                    found[f"{device} {stat.st_ino} "] = str(path)
    strangers = _holders(found, but=run) if found else set()
    yield from (path for path in found.values() if path not in strangers)


def _holders(found: dict[str, str], *, but: set[int]) -> set[str]:
    held: set[str] = set()
    for name in os.listdir("/proc"):  # noqa: PTH208
        if not name.isdigit() or int(name) in but:
            continue
        with suppress(OSError):
            maps = Path(f"/proc/{name}/maps").read_text(errors="replace")
            held |= {path for inode, path in found.items() if inode in maps}
            for fd in os.scandir(f"/proc/{name}/fd"):
                with suppress(OSError):
                    held |= set(found.values()) & {os.readlink(fd.path)}  # noqa: PTH115
    return held


def _inodes(pids: list[int]) -> set[str]:
    found: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            for fd in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    target = os.readlink(fd.path)  # noqa: PTH115
                    if target.startswith("socket:["):
                        found.add(target[8:-1])
    return found


def _listening(inodes: set[str]) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        for fields in _table(f"/proc/net/{name}"):
            if fields[3] == _LISTENING_TCP and fields[9] in inodes:
                yield f"{name} port {int(fields[1].rpartition(':')[2], 16)}"
    for fields in _table("/proc/net/unix"):
        if fields[3] == _LISTENING_UNIX and fields[6] in inodes:
            yield f"unix {fields[7] if len(fields) > 7 else fields[6]}"  # noqa: PLR2004


def _table(path: str) -> Iterator[list[str]]:
    with suppress(OSError):
        for line in Path(path).read_text(errors="replace").splitlines()[1:]:
            yield line.split()


def _locks(inodes: set[int]) -> Iterator[str]:
    """Give locks on the files of the scenario's runtime directory."""
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            inode = next((f.rpartition(":")[2] for f in fields if f.count(":") == 2), "")  # noqa: PLR2004
            if inode.isdigit() and int(inode) in inodes:
                yield " ".join(fields[1:5])


def _cgroups(runtime: Path) -> Iterator[str]:
    """Give the cgroups of runs that this scenario has registered, as far as they still exist."""
    own = own_cgroup()
    if own is not None:
        noted = runtime.parent / "cgroups"
        known = set(noted.read_text().split()) if noted.exists() else set()
        for record in records(runtime):
            with suppress(OSError):
                for line in record.read_text(errors="replace").splitlines():
                    with suppress(ValueError):
                        facts = json.loads(line)
                        if facts.get("kind") == "cgroup":
                            known.add(facts["path"])
        noted.write_text("\n".join(sorted(known)))
        yield from (path for path in known if Path(path).is_dir())
