"""`stopbath sweep`: end and remove what dead runs left, by identity only."""

from __future__ import annotations

import json
import sys
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stopbath.cli.show import Column, say, table, width
from stopbath.lifecycle._leftovers import leftovers
from stopbath.lifecycle._runs import registered
from stopbath.lifecycle._sweep import sweep as sweep_run
from stopbath.survey.listing import list_all, look

if TYPE_CHECKING:
    from stopbath.lifecycle._leftovers import Leftovers
    from stopbath.lifecycle._runs import Claim
    from stopbath.lifecycle._sweep import Swept
    from stopbath.survey.listing import Entry

__all__ = ["sweep"]

_COLUMNS = (Column("", 6), Column("PID", 8, ">"), Column("WHY", 26), Column("WHAT", 36))


def sweep(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what is there.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """End and remove what dead runs left. Exits with 1 when something remains.

    Asks first. Without a terminal to ask on, and without --yes, it only shows.
    """
    _, claims = registered(claim_dead=True)
    try:
        found = [leftovers(claim.run) for claim in claims]
        orphans = [one for one in list_all(look(0.0)).foreign if one.orphan]
        act = not dry_run and (yes or (not as_json and sys.stdin.isatty() and bool(claims)))
        if not as_json:
            _show(found, orphans)
            if act and not yes:
                act = typer.confirm("End and remove this?")
            elif claims and not act and not dry_run:
                say("nothing was done: run it with --yes, or on a terminal")
        swept = [sweep_run(claim) for claim in claims] if act else []
    finally:
        _let_go(claims)
    if as_json:
        say(json.dumps(_as_dict(found, orphans, swept, acted=act), indent=2))
    else:
        for done in swept:
            say(str(done), "green" if done.over else "red")
    if any(not done.over for done in swept):
        raise typer.Exit(1)


def _let_go(claims: list[Claim]) -> None:
    for claim in claims:
        claim.close()


def _show(found: list[Leftovers], orphans: list[Entry]) -> None:
    for left in found:
        run = left.run
        say(f"dead run {run.name} ({run.kind} {run.run_id}, started {run.started_at})", "bold")
        rows = [("end", str(one.pid), one.why, one.what) for one in left.processes]
        rows += [("leave", str(one.pid or "-"), one.why, one.what) for one in left.untouched]
        if rows:
            table(_COLUMNS, rows, "dim")
        for thing in left.resources:
            say(f"remove {thing.what}")
        if not left.processes and not left.resources:
            say("remove its record; nothing else of it is to be ended")
    if not found:
        say("no dead run has left anything")
    if orphans:
        say("not touched: known by name only, which proves nothing", "bold")
        rows = [("leave", str(it.pid), f"{it.user}'s {it.part}", it.command) for it in orphans]
        table(_COLUMNS, rows, "dim")
    for orphan in orphans:
        for line in wrap(f"{orphan.pid}: {orphan.orphan}", width() - 7):
            say(f"       {line}")


def _as_dict(
    found: list[Leftovers], orphans: list[Entry], swept: list[Swept], *, acted: bool
) -> dict[str, Any]:
    return {
        "schema": "stopbath.sweep/1",
        "acted": acted,
        "found": [
            {
                "run_id": left.run.run_id,
                "name": left.run.name,
                "kind": left.run.kind,
                "processes": [one._asdict() for one in left.processes],
                "resources": [one._asdict() for one in left.resources],
                "untouched": [one._asdict() for one in left.untouched],
            }
            for left in found
        ],
        "orphans_not_touched": [one._asdict() for one in orphans],
        "swept": [
            done._asdict() | {"untouched": [one._asdict() for one in done.untouched]}
            for done in swept
        ],
    }
