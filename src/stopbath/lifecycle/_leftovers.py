"""What dead runs left, and the proof that it is theirs. Looks, and touches nothing.

What is a run's own has to be proved: a recorded pid with its start time in the same boot and
PID namespace, a process in the run's cgroup, one below such a process, or one that was born
with the run's random mark in its environment. Names prove nothing. What is not proved, is
another user's, or is above the process that looks, is named and left alone.
"""

from __future__ import annotations

import os
import socket
import stat
from typing import TYPE_CHECKING, Any, NamedTuple

from stopbath.lifecycle._containment import members
from stopbath.lifecycle._process import descendants, read_stat
from stopbath.lifecycle._registry import MARK, this_host

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stopbath.lifecycle._runs import Run

__all__ = [
    "Left",
    "Leftovers",
    "answers",
    "command_line",
    "is_cgroup_of",
    "leftovers",
    "resources_of",
]

_SHM = "/dev/shm"  # noqa: S108  (where the kernel has it)


class Left(NamedTuple):
    """One thing a dead run left: what it is, and the proof; for a process its identity too."""

    what: str
    why: str
    pid: int = 0
    start: int = 0


class Leftovers(NamedTuple):
    """What is there of one dead run, and what of it is not to be touched, with the reason."""

    run: Run
    processes: tuple[Left, ...]
    resources: tuple[Left, ...]
    untouched: tuple[Left, ...]


def leftovers(run: Run) -> Leftovers:
    """Find what a dead run left. Touches nothing."""
    resources, untouched = resources_of(run)
    if run.host != this_host():
        if _boot(run.host) == _boot(this_host()):
            untouched.append(Left(f"run {run.run_id}", "its pids are of another PID namespace"))
        return Leftovers(run, (), tuple(resources), tuple(untouched))
    above = set(_above(os.getpid()))
    found: list[Left] = []
    for one in _processes(run):
        if one.pid in above:
            untouched.append(one._replace(why="this sweep runs below it"))
        elif not _may_signal(one.pid):
            untouched.append(one._replace(why="another user's"))
        else:
            found.append(one)
    if any(one.pid in above for one in untouched):
        found.clear()  # asked from inside a dead run: what else is there is somebody's work
    return Leftovers(run, tuple(found), tuple(resources), tuple(untouched))


def _boot(host: str) -> str:
    return host.partition(" ")[0]


def _processes(run: Run) -> Iterator[Left]:
    """Give the run's living processes, each once, with the first proof that was found."""
    seen = {one.pid for one in run.processes if not one.ours}
    waiting: list[tuple[int, int, str]] = [
        (one.pid, one.start, f"{one.role} {one.name} of the run")
        for one in run.processes
        if one.ours
    ]
    for resource in run.resources:
        if resource.get("kind") == "cgroup" and is_cgroup_of(run, resource):
            waiting += _alive(members(resource["path"]), "in the run's cgroup")
    if run.run_id:
        waiting += _alive(_marked(run), "carries the run's mark")
    while waiting:
        pid, start, why = waiting.pop(0)
        found = read_stat(pid)
        if pid in seen or found is None or found.start != start or found.state in "ZX":
            continue
        seen.add(pid)
        yield Left(command_line(pid), why, pid, start)
        for ref in descendants(pid):
            waiting.append((ref.pid, ref.start, f"below {pid}"))
            ref.close()


def _alive(pids: list[int], why: str) -> list[tuple[int, int, str]]:
    stats = ((pid, read_stat(pid)) for pid in pids)
    return [(pid, found.start, why) for pid, found in stats if found is not None]


def _marked(run: Run) -> list[int]:
    """Find who was born with the run's mark; a title that overwrote it hides a process here."""
    mark = f"{MARK}={run.run_id}".encode()
    born = min((one.start for one in run.processes), default=0)
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                marked = mark in file.read().split(b"\0")
        except OSError:
            continue
        stats = read_stat(name) if marked else None
        if stats is not None and stats.start >= born:
            found.append(int(name))
    return found


def command_line(pid: int) -> str:
    """Give a process's command line for a person to read, shortened."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(400).replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return "?"


def _above(pid: int) -> Iterator[int]:
    """Give a process and its ancestors."""
    while pid > 0:
        yield pid
        found = read_stat(pid)
        pid = found.ppid if found is not None else 0


def _may_signal(pid: int) -> bool:
    try:
        return os.geteuid() == 0 or os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except OSError:
        return True  # has ended meanwhile


def resources_of(run: Run) -> tuple[list[Left], list[Left]]:
    """Tell what is there and provably the run's own from what is there and is not."""
    own: list[Left] = []
    other: list[Left] = []
    for resource in run.resources:
        try:
            kind, path = resource["kind"], str(resource["path"])
            if not os.path.lexists(path):
                continue
            if kind == "cgroup":
                why = "" if is_cgroup_of(run, resource) else "not this run's by its name"
            else:
                why = _why_not_own(kind, path, resource)
        except (KeyError, OSError) as error:
            other.append(Left(str(resource), f"not provable: {error}"))
            continue
        line = Left(f"{kind} {path}", why or "recorded by the run while it lived")
        (other if why else own).append(line)
    return own, other


def is_cgroup_of(run: Run, resource: dict[str, Any]) -> bool:
    """Its name holds the run's random number, and it is a cgroup."""
    path = str(resource.get("path", ""))
    return (
        bool(run.run_id)
        and os.path.basename(path) == f"stopbath-{run.run_id}"
        and os.path.isfile(f"{path}/cgroup.procs")
    )


def _why_not_own(kind: str, path: str, resource: dict[str, Any]) -> str:
    """Say why a file is not to be removed; empty when it is the run's own and nobody's now."""
    found = os.lstat(path)
    if (found.st_dev, found.st_ino) != (resource["dev"], resource["ino"]):
        return "another file has its name now"
    if found.st_uid != os.geteuid():
        return "another user's"
    if kind == "socket" and stat.S_ISSOCK(found.st_mode):
        return "somebody listens on it" if answers(path) else ""
    if kind == "shm" and os.path.dirname(path) == _SHM and stat.S_ISREG(found.st_mode):
        return _who_holds(found)
    return "of a kind that is not removed"


def answers(path: str) -> bool:
    """Connect: only a refusal proves that nobody is behind a socket file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True


def _who_holds(file: os.stat_result) -> str:
    """Say who has a file open or mapped; not being able to look at somebody is an answer too."""
    device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x} {file.st_ino} "
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/maps", encoding="utf-8", errors="replace") as maps:
                held = any(device in line for line in maps)
            held = held or any(
                _same(f"/proc/{name}/fd/{fd}", file) for fd in os.listdir(f"/proc/{name}/fd")
            )
        except PermissionError:
            if file.st_mode & 0o077:  # another user could hold it
                return f"not provable: process {name} cannot be looked at"
            continue
        except OSError:
            continue
        if held:
            return f"still owned: process {name} holds it"
    return ""


def _same(path: str, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), file)
    except OSError:
        return False
