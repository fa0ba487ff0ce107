"""What `stopbath ps` shows: our runs as trees, and everybody else's model servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from stopbath.devices import Holder, LedgerAbsent, holders, open_ledger
from stopbath.lifecycle._leftovers import Leftovers, leftovers
from stopbath.lifecycle._registry import this_host
from stopbath.lifecycle._runs import registered
from stopbath.survey.known import Known, recognise
from stopbath.survey.processes import Process, listening_ports, snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stopbath.devices import Claim, Device, Ledger
    from stopbath.lifecycle._runs import Run

__all__ = ["Entry", "Listing", "RunListing", "Sight", "list_all", "look"]

_REAPERS = frozenset(
    ("systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "s6-svscan", "runsvdir")
)
"""Who adopts orphans: a worker below one of these has lost who launched it."""


class Sight(NamedTuple):
    """Everything that was looked at, once, so that all of the listing is of one moment."""

    processes: Mapping[int, Process]
    ports: Mapping[int, Sequence[int]]
    runs: Sequence[Run]
    left: Mapping[str, Leftovers]  # by run id, of dead runs
    devices: Sequence[Device]
    claims: Sequence[Claim]
    holders: Sequence[Holder]
    host: str
    notes: Sequence[str]


class Entry(NamedTuple):
    """One process in the listing. `device_bytes` is None where it holds no device's memory."""

    pid: int
    parent: int
    part: str  # its part in a run, or the product it is of
    name: str
    user: str
    state: str
    age_s: float
    memory_bytes: int
    device_bytes: int | None
    devices: tuple[str, ...]
    ports: tuple[int, ...]
    command: str
    orphan: str  # why it is one; empty when it is none
    depth: int = 0


class RunListing(NamedTuple):
    """One run, its processes in the order of the tree."""

    run_id: str
    kind: str
    name: str
    live: bool
    started_at: str
    processes: tuple[Entry, ...]
    resources: tuple[str, ...]
    untouched: tuple[str, ...]


class Listing(NamedTuple):
    """The answer. `notes` say what could not be seen."""

    runs: tuple[RunListing, ...]
    foreign: tuple[Entry, ...]
    devices: tuple[Device, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Give JSON-able data."""
        return {
            "schema": "stopbath.ps/1",
            "runs": [
                run._asdict() | {"processes": [one._asdict() for one in run.processes]}
                for run in self.runs
            ],
            "foreign": [one._asdict() for one in self.foreign],
            "devices": [one._asdict() for one in self.devices],
            "notes": list(self.notes),
        }


def look(now: float, ledger: Ledger | None = None) -> Sight:
    """Look at the host; `now` is the wall clock's. Without a `ledger`, the driver's own."""
    notes: list[str] = []
    devices: Sequence[Device] = ()
    claims: Sequence[Claim] = ()
    try:
        book = ledger or open_ledger()
        try:
            devices, claims = book.devices(), book.claims()
        finally:
            if ledger is None:
                book.close()
    except LedgerAbsent as error:
        notes.append(f"no device memory: {error}")
    held, hidden = holders()
    if hidden > 1:  # PID 1 of a container is often shut to everybody
        notes.append(f"{hidden} processes could not be looked at: run as root to see who they are")
    runs, _ = registered()
    return Sight(
        processes=snapshot(now),
        ports=listening_ports(),
        runs=runs,
        left={run.run_id: leftovers(run) for run in runs if not run.live},
        devices=devices,
        claims=claims,
        holders=held,
        host=this_host(),
        notes=notes,
    )


def list_all(sight: Sight) -> Listing:
    """Sort what was seen into runs and the rest. Pure."""
    ours: set[int] = set()
    runs = []
    for run in sight.runs:
        left = sight.left.get(run.run_id)
        listing = _living(run, sight) if left is None else _dead(run, left, sight)
        ours |= {entry.pid for entry in listing.processes if entry.part != "program"}
        runs.append(listing)
    foreign = _foreign(sight, ours)
    notes = list(sight.notes)
    unseen = sorted({claim.pid for claim in sight.claims} - sight.processes.keys())
    if unseen:
        pids = ", ".join(map(str, unseen))
        notes.append(f"the driver names processes that are not to be seen here: {pids}")
    return Listing(tuple(runs), tuple(foreign), tuple(sight.devices), tuple(notes))


# -- our runs


def _living(run: Run, sight: Sight) -> RunListing:
    parts: dict[int, tuple[str, str]] = {}
    if run.host == sight.host:
        for one in run.processes:
            there = sight.processes.get(one.pid)
            if there is not None and there.start == one.start:
                parts[one.pid] = (one.role, one.name)
    own = {pid for pid, (role, _) in parts.items() if role != "program"}
    for pid in _below(own, sight.processes):
        parts.setdefault(pid, ("child", ""))
    entries = [_entry(sight, pid, part, name) for pid, (part, name) in parts.items()]
    return _run_listing(run, _as_tree(entries))


def _dead(run: Run, left: Leftovers, sight: Sight) -> RunListing:
    entries = [
        _entry(sight, one.pid, "left over", "", orphan=f"its run is dead; {one.why}")
        for one in left.processes
        if one.pid in sight.processes
    ]
    return _run_listing(run, _as_tree(entries), left)


def _run_listing(run: Run, entries: list[Entry], left: Leftovers | None = None) -> RunListing:
    return RunListing(
        run.run_id,
        run.kind,
        run.name,
        run.live,
        run.started_at,
        tuple(entries),
        tuple(one.what for one in left.resources) if left else (),
        tuple(f"{one.what}: {one.why}" for one in left.untouched) if left else (),
    )


def _below(pids: Iterable[int], processes: Mapping[int, Process]) -> list[int]:
    children: dict[int, list[int]] = {}
    for one in processes.values():
        children.setdefault(one.ppid, []).append(one.pid)
    line = list(pids)
    for pid in line:
        line += [child for child in children.get(pid, ()) if child not in line]
    return line


def _as_tree(entries: list[Entry]) -> list[Entry]:
    """Order children after their parents, with their depth; the oldest first."""
    there = {entry.pid for entry in entries}
    below: dict[int, list[Entry]] = {}
    for entry in sorted(entries, key=lambda one: (-one.age_s, one.pid)):
        below.setdefault(entry.parent if entry.parent in there else 0, []).append(entry)
    ordered: list[Entry] = []

    def walk(parent: int, depth: int) -> None:
        for entry in below.get(parent, ()):
            ordered.append(entry._replace(depth=depth))
            walk(entry.pid, depth + 1)

    walk(0, 0)
    return ordered


# -- everybody else's


def _foreign(sight: Sight, ours: set[int]) -> list[Entry]:
    holding = {one.pid for one in sight.holders} | {claim.pid for claim in sight.claims}
    found = []
    for pid, process in sight.processes.items():
        known = recognise(process.argv or (process.name,))
        if pid in ours or (known is None and pid not in holding):
            continue
        part = known.product if known is not None else "device holder"
        why = _orphan(process, known, sight.processes)
        found.append(_entry(sight, pid, part, process.name, orphan=why))
    return _as_tree(found)


def _orphan(process: Process, known: Known | None, processes: Mapping[int, Process]) -> str:
    """Say why a process is an orphan; empty when it is none, or when nobody can tell.

    A launcher below PID 1 is a service or was started with nohup: only what something must have
    launched can have lost it.
    """
    if process.state == "zombie":
        return f"dead, and not reaped by its parent {process.ppid}"
    if known is None or known.role != "worker":
        return ""
    parent = processes.get(process.ppid)
    if parent is not None and parent.pid != 1 and parent.name not in _REAPERS:
        return ""
    if parent is not None and recognise(parent.argv) is not None:
        return ""  # PID 1 of a container is the launcher itself
    who = parent.name if parent is not None else "nobody"
    return f"a worker whose launcher is gone: its parent is {process.ppid} ({who})"


def _entry(sight: Sight, pid: int, part: str, name: str, *, orphan: str = "") -> Entry:
    process = sight.processes[pid]
    claims = [claim for claim in sight.claims if claim.pid == pid]
    files = {file for one in sight.holders if one.pid == pid for file in one.files}
    return Entry(
        pid=pid,
        parent=process.ppid,
        part=part,
        name=name or process.name,
        user=process.user,
        state=process.state,
        age_s=round(process.age_s, 1),
        memory_bytes=process.memory_bytes,
        device_bytes=sum(claim.used_bytes or 0 for claim in claims) if claims else None,
        devices=tuple(sorted(files | {f"device {claim.device}" for claim in claims})),
        ports=tuple(sight.ports.get(pid, ())),
        command=" ".join(process.argv) or f"[{process.name}]",
        orphan=orphan,
    )
