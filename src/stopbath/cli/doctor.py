"""`stopbath doctor`: what this host gives, what follows from it, and what would help."""

from __future__ import annotations

import json
import textwrap
from typing import Annotated

import typer

from stopbath.cli.show import Column, say, table, width
from stopbath.errors import UsageError
from stopbath.survey.budget import LIMITS, divide
from stopbath.survey.doctor import examine

__all__ = ["doctor"]

_SIGNS = {"good": ("ok", "green"), "note": ("note", "yellow"), "warning": ("WARN", "bold red")}
_INDENT = " " * 25


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    budget: Annotated[
        bool, typer.Option("--budget", help="How a stop's time is divided, against limits.")
    ] = False,
    drain: Annotated[float, typer.Option(help="With --budget: seconds to drain.")] = 5.0,
    terminate: Annotated[float, typer.Option(help="Seconds between SIGTERM and SIGKILL.")] = 2.0,
    kill: Annotated[float, typer.Option(help="Seconds to wait after SIGKILL.")] = 2.0,
    grace: Annotated[
        float | None, typer.Option(help="Seconds your own service manager allows.")
    ] = None,
) -> None:
    """Say what this host gives and guarantees, and what would improve it."""
    if budget:
        _budget(drain, terminate, kill, grace, as_json=as_json)
        return
    found = examine()
    if as_json:
        findings = [one._asdict() for one in found]
        say(json.dumps({"schema": "stopbath.doctor/1", "findings": findings}, indent=2))
    else:
        for one in found:
            sign, style = _SIGNS[one.level]
            _say_wrapped(f"{sign:<5} {one.topic:<18} ", one.found, style)
            if one.consequence:
                _say_wrapped(f"{_INDENT}so: ", one.consequence)
            if one.remedy:
                _say_wrapped(f"{_INDENT}remedy: ", one.remedy)


def _say_wrapped(first: str, text: str, style: str = "") -> None:
    lines = textwrap.wrap(
        text,
        width(),
        initial_indent=first,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in lines:
        say(line, style)


def _budget(
    drain: float, terminate: float, kill: float, grace: float | None, *, as_json: bool
) -> None:
    for name, value in (("drain", drain), ("terminate", terminate), ("kill", kill)):
        if not 0 <= value < float("inf"):
            raise UsageError(f"--{name} must be a number of seconds >= 0, not {value}")
    limits = LIMITS if grace is None else (*LIMITS, ("yours", grace))
    phases, budgets = divide(drain, terminate, kill, limits)
    if as_json:
        say(
            json.dumps(
                {
                    "schema": "stopbath.budget/1",
                    "phases": [one._asdict() for one in phases],
                    "limits": [one._asdict() for one in budgets],
                },
                indent=2,
            )
        )
        return
    rows = [(it.name, f"{it.from_s:g}", f"{it.to_s:g}", it.what) for it in phases]
    columns = (Column("PHASE", 9), Column("FROM s", 7, ">"), Column("TO s", 7, ">"))
    table((*columns, Column("MEANS", 50)), rows)
    say("Every phase ends as soon as the last worker has; this is the worst case.")
    say()
    for it in budgets:
        allows = f"{it.who} allows {it.limit_s:g} s, the worst case takes {it.worst_s:g} s"
        if not it.cut:
            say(f"ok    {allows}", "green")
        else:
            say(f"WARN  {allows}: cut off in {it.cut}", "bold red")
            say(f"      remedy: {it.remedy}")
