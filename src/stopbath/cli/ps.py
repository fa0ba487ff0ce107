"""`stopbath ps`: our runs as trees, and everybody else's model servers."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from stopbath.cli.show import Column, duration, memory, remark, say, table
from stopbath.survey.listing import list_all, look

if TYPE_CHECKING:
    from stopbath.survey.listing import Entry, Listing, RunListing

__all__ = ["ps"]

_COLUMNS = (
    Column("PID", 8, ">"),
    Column("PROCESS", 26),
    Column("STATE", 8),
    Column("AGE", 6, ">"),
    Column("MEM", 6, ">"),
    Column("DEVICE", 6, ">"),
    Column("PORTS", 12),
)
_STATES = {"disk-sleep": "D state", "tracing-stop": "traced"}


def ps(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """List stopbath's runs and the model servers of everybody else."""
    now = time.time()  # noqa: TID251  (ages are for people: no deadline hangs on them)
    listing = list_all(look(now))
    if as_json:
        say(json.dumps(listing.to_dict(), indent=2))
    else:
        _show(listing)


def _show(listing: Listing) -> None:
    for run in listing.runs:
        _show_run(run)
    if listing.foreign:
        say("of no run that is registered here", "bold")
        _show_entries(listing.foreign)
    if not listing.runs and not listing.foreign:
        say("no run, and no model server's process")
    for device in listing.devices:
        used, total = memory(device.used_bytes), memory(device.total_bytes)
        say(f"device {device.number}  {device.name}  {used} of {total} in use")
    for note in listing.notes:
        remark(f"note: {note}", "dim")


def _show_run(run: RunListing) -> None:
    state = "alive" if run.live else "DEAD"
    say(
        f"{run.kind} {run.name}  run {run.run_id}  {state}  since {run.started_at}",
        "bold green" if run.live else "bold red",
    )
    _show_entries(run.processes)
    for what in run.resources:
        remark(f"         left over: {what}")
    for what in run.untouched:
        remark(f"         not to be touched: {what}")
    if not run.live:
        say("         stopbath sweep ends and removes what is left of it", "dim")
    say()


def _show_entries(entries: tuple[Entry, ...]) -> None:
    rows = []
    for entry in entries:
        indent = "  " * entry.depth
        part = f"{entry.part} {entry.name}" if entry.name != entry.part else entry.part
        rows.append(
            (
                str(entry.pid),
                indent + part,
                _STATES.get(entry.state, entry.state),
                duration(entry.age_s),
                memory(entry.memory_bytes),
                memory(entry.device_bytes) or ("held" if entry.devices else ""),
                ",".join(map(str, entry.ports)),
            )
        )
    if rows:
        table(_COLUMNS, rows, "dim")
    for entry in entries:
        if entry.orphan:
            remark(f"{entry.pid:>8} orphan: {entry.orphan}", "yellow")
