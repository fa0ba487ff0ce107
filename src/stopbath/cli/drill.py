"""`stopbath drill`: the fault matrix, played on this machine."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from stopbath.cli.show import Column, say, table
from stopbath.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stopbath.drill.conductor import Turn
    from stopbath.drill.scenario import Absent, Result, Scenario

__all__ = ["drill"]

_COLUMNS = (
    Column("ID", 4),
    Column("FACE", 7),
    Column("SCENARIO", 35),
    Column("BOUND", 6, ">"),
    Column("TOOK", 7, ">"),
    Column("LEFT BEHIND", 16),
)
_WORDS = {
    "ok": "nothing",
    "late": "nothing, late",
    "unverified": "NOT VERIFIED",
    "wrong": "nothing, WRONG",
    "broken": "NOT PLAYED",
    "absent": "not applicable",
}
_FAILED = 1


def drill(
    list_only: Annotated[bool, typer.Option("--list", help="Say what there is to play.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="Play this scenario (F02g) or kind (F02); repeatable.")
    ] = None,
    face: Annotated[str, typer.Option(help="library, run or serve; by default all.")] = "",
    repeat: Annotated[int, typer.Option(help="How often to play each.")] = 1,
    jobs: Annotated[int, typer.Option(help="How many at a time; 0: one for each core.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the choices that are random.")] = 0,
    soak: Annotated[
        int, typer.Option(help="Instead: so many random start, fault and stop cycles.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Inject every fault of the matrix here, and show what is left behind: nothing."""
    if repeat < 1 or jobs < 0 or soak < 0:
        raise UsageError("--repeat is at least 1, --jobs and --soak at least 0")
    if soak:
        from stopbath.drill.soak import main

        raise typer.Exit(main(["--cycles", str(soak), "--seed", str(seed)]))
    chosen, absent = _choose(only or [], face)
    if list_only:
        _list(chosen, absent, as_json=as_json)
        return
    from stopbath.drill.conductor import turns

    todo = turns(
        [it for it in chosen if not it.why_not()],
        repeat=repeat,
        seed=seed,
    )
    began = time.monotonic()
    results = _play(todo, jobs or os.cpu_count() or 1)
    results += [_absent(it.id, it.face, it.why_not(), it.title) for it in chosen if it.why_not()]
    results += [_absent(it.kind, it.face, it.reason, it.reason) for it in absent]
    _show(results, time.monotonic() - began, as_json=as_json)
    if not all(result.good for result in results):
        raise typer.Exit(_FAILED)


def _choose(only: Sequence[str], face: str) -> tuple[list[Scenario], list[Absent]]:
    from stopbath.drill.catalog import ABSENT, SCENARIOS
    from stopbath.drill.scenario import FACES

    if face and face not in FACES:
        raise UsageError(f"--face is one of {', '.join(FACES)}, not {face}")
    for word in only:
        if not any(word in {it.id, it.kind} for it in SCENARIOS):
            raise UsageError(f"there is no scenario {word}: see stopbath drill --list")
    chosen = [
        it
        for it in SCENARIOS
        if (not only or it.id in only or it.kind in only) and face in {"", it.face}
    ]
    absent = [it for it in ABSENT if (not only or it.kind in only) and face in {"", it.face}]
    return chosen, absent


def _absent(ident: str, face: str, reason: str, title: str) -> Result:
    from stopbath.drill.scenario import Result

    return Result(ident, face, title, 0.0, control=False, state="absent", problems=(reason,))


def _list(chosen: list[Scenario], absent: list[Absent], *, as_json: bool) -> None:
    if as_json:
        told = [
            {
                "id": it.id,
                "kind": it.kind,
                "face": it.face,
                "title": it.title,
                "injection": it.injection,
                "bound_s": it.bound_s,
                "not_applicable": it.why_not(),
                "simulated": it.simulated(),
            }
            for it in chosen
        ]
        missing = [it._asdict() for it in absent]
        say(json.dumps({"schema": "stopbath.drill.list/1", "scenarios": told, "absent": missing}))
        return
    rows = [
        (
            it.id,
            it.face,
            _titled(it.title, it.simulated()),
            f"{it.bound_s:g} s",
            f"not here: {why}" if why else "",
        )
        for it in chosen
        for why in (it.why_not(),)
    ]
    id_, face_, _, bound, *_ = _COLUMNS
    table((id_, face_, Column("SCENARIO", 54), bound, Column("", 5)), rows)
    for it in absent:
        say(f"{it.kind:<4} {it.face:<7} not applicable: {it.reason}", "dim")


def _play(todo: list[Turn], jobs: int) -> list[Result]:
    from stopbath.drill.conductor import conduct

    with ExitStack() as stack:
        return list(conduct(todo, jobs=jobs, on_result=_progress(stack, len(todo))))


def _progress(stack: ExitStack, total: int) -> Callable[[Result], None]:
    """Show a bar on a terminal, on stderr; elsewhere nothing."""
    if not sys.stderr.isatty():
        return lambda _: None
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    bar = stack.enter_context(
        Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=Console(stderr=True),
            transient=True,
        )
    )
    task = bar.add_task("drill", total=total)
    return lambda result: bar.update(task, advance=1, description=result.id)


def _show(results: list[Result], took_s: float, *, as_json: bool) -> None:
    results = sorted(results, key=lambda it: (it.control, it.id, it.face))
    bad = [it for it in results if not it.good]
    plain = [it for it in results if not it.control and it.state != "absent"]
    controls = [it for it in results if it.control]
    if as_json:
        told = [it.to_dict() for it in results]
        head = {"schema": "stopbath.drill/1", "took_s": round(took_s, 1), "good": not bad}
        say(json.dumps(head | {"results": told}, indent=1))
        return
    table(_COLUMNS, [_row(it) for it in results if not it.control])
    for it in bad:
        say()
        say(f"{it.id} {'(control) ' if it.control else ''}{it.title}: {it.state}", "bold red")
        for column, words in it.left.items():
            for word in words:
                say(f"     left behind: {column.replace('_', ' ')}: {word}")
        for problem in it.problems:
            say(f"     {problem}")
    say()
    left = sum(1 for it in plain if it.left)
    good = sum(it.good for it in plain)
    absent = sum(it.state == "absent" for it in results)
    say(
        f"{good} of {len(plain)} as they should be, {left} left something behind, "
        f"{absent} not applicable; {took_s:.0f} s",
        "bold red" if bad else "bold green",
    )
    for why in sorted({it.simulated for it in plain if it.simulated}):
        on_one = ", ".join(dict.fromkeys(it.id for it in plain if it.simulated == why))
        say(f"on a simulated device ({why}): {on_one}")
    blind = [it.id for it in controls if not it.good]
    verdict = f"these passed, as none may: {', '.join(blind)}" if blind else "none passed"
    say(f"{len(controls)} controls (injection aimed at nothing): {verdict}")


def _titled(title: str, simulated: str) -> str:
    return f"simulated device: {title}" if simulated else title


def _row(it: Result) -> tuple[str, ...]:
    bound = f"{it.bound_s:g} s" if it.bound_s else ""
    took = "" if it.took_s is None else f"{it.took_s:.3f} s"
    counts = [f"{len(words)} {column.replace('_', ' ')}" for column, words in it.left.items()]
    return (
        it.id,
        it.face,
        _titled(it.title, it.simulated),
        bound,
        took,
        ", ".join(counts) or _WORDS[it.state],
    )
