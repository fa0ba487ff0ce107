"""Hundreds of starts, each hit at a random instant: `python -m stopbath.drill.starts`.

On every face somebody (the program, the guardian, the keeper, the server, the command, a worker)
gets SIGKILL, SIGTERM or SIGINT between 0 and 3 seconds after the start; shortly after that the run
is asked to end. Nothing may be left, and the run must have ended within its bound. Every choice
comes from the seed and the number of the run: `--run N` plays a single one again.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from stopbath.drill import expectations as so
from stopbath.drill.faces import command, library, needs_server, server
from stopbath.drill.scenario import Scenario
from stopbath.drill.scene import pause
from stopbath.drill.seeded import asked_for
from stopbath.lifecycle import ProcessRef
from stopbath.lifecycle._process import children_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopbath.drill.scenario import Face, Result
    from stopbath.drill.scene import Scene

__all__ = ["Start", "main", "scenario_of", "start_of"]

PREFIX = "start"
_BOUND_S = (
    4.0  # the graces of a drill's server, one second of its guardian's, one of a busy machine
)
_LATEST_S = 3.0
_LAST_HOPE, _ALONE_S = ("library", "keeper"), 0.15
_VICTIMS: dict[Face, tuple[str, ...]] = {
    "library": ("front", "keeper", "w0"),
    "serve": ("front", "keeper", "server", "rank0", "rank0"),
    "run": ("front", "keeper", "command"),
}
_HABITS = ("", "", "deaf", "helper", "stray", "deaf,stray", "hangs at start", "raises at start")
_COMMANDS = ("", "deaf", "stray", "deaf,stray")


class Start(NamedTuple):
    """The choices of one run; times in seconds."""

    face: Face
    victim: str
    number: int
    at_s: float  # after the start; somebody who is not there yet is hit on sight
    lull_s: float  # between the blow and the request to end
    ending: int  # the signal that asks for it
    habits: str


def start_of(seed: int, run: int) -> Start:
    """Choose a run; the same for the same two numbers, on every machine."""
    rng = random.Random(f"start:{seed}:{run}")  # noqa: S311  (choices that a seed replays)
    face: Face = rng.choice(("library", "library", "serve", "serve", "run"))
    victim = rng.choice(_VICTIMS[face])
    return Start(
        face,
        victim,
        int(rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT))),
        # Most of them early: what starts is where windows are.
        rng.choice((0.0, rng.uniform(0, 0.2), rng.uniform(0, 1.0), rng.uniform(0, _LATEST_S))),
        # The program alone ends what a keeper's strays are; both at once is beyond any tree.
        rng.choice((0.0, rng.uniform(0, 0.5))) + _ALONE_S * ((face, victim) == _LAST_HOPE),
        int(rng.choice((signal.SIGTERM, signal.SIGINT))),
        rng.choice(_COMMANDS if face == "run" else _HABITS),
    )


def scenario_of(ident: str) -> Scenario:
    """Give the run called `start/SEED/N` as a scenario; `LookupError` when it is none."""
    prefix, *numbers = ident.split("/")
    if prefix != PREFIX or len(numbers) != 2 or not all(it.isdigit() for it in numbers):  # noqa: PLR2004
        raise LookupError(f"there is no scenario {ident!r}")
    it = start_of(*map(int, numbers))
    setups = {
        "library": lambda: library("obedient", it.habits, wait=""),
        "serve": lambda: server(it.habits, ranks=2, wait=False),
        "run": lambda: command(it.habits, wait=False),
    }
    name = signal.Signals(it.number).name
    return Scenario(
        id=ident,
        face=it.face,
        title=f"{name} for {it.victim} after {it.at_s:.3f} s ({it.habits or 'obedient'})",
        injection=f"{name} at random",
        bound_s=_BOUND_S,
        setup=setups[it.face](),
        inject=lambda scene: _hit(scene, it),
        verify=lambda scene: _has_taken_effect(scene, it),
        then=lambda scene: _end(scene, it),
        needs=(needs_server,) if it.face == "serve" else (),
        swept=True,  # both holders of the record may be dead: a file, for the next start
    )


def _hit(scene: Scene, it: Start) -> None:
    """Strike at the instant, or as soon as the victim is there; it may never be."""
    pause(it.at_s)
    found = scene.until(
        lambda: _find(scene, it.victim) or _over(scene) or scene.told("start failed"), _LATEST_S
    )
    scene.hit_at = time.monotonic()
    if isinstance(found, ProcessRef):
        found.send(it.number)
        scene.notes["hit"] = found


def _over(scene: Scene) -> bool:
    return scene.exit_code() is not None


def _find(scene: Scene, name: str) -> ProcessRef | None:
    """Find somebody by descent, which shows him before he has said who he is."""
    front = scene.refs["front"]
    if name == "front":
        return front
    below = _first_child(front.pid)
    if name in {"server", "command", "w0"} and below is not None:
        below = _first_child(below)
    elif name.startswith("rank"):
        return scene.refs[name] if scene.knows(name) else None
    if below is None:
        return None
    try:
        scene.refs[name] = ProcessRef.open(below)
    except ProcessLookupError:
        return None
    return scene.refs[name]


def _first_child(pid: int) -> int | None:
    with suppress(OSError):
        return next(iter(children_of(pid)), None)
    return None


def _has_taken_effect(scene: Scene, it: Start) -> str:
    hit = scene.notes.get("hit")
    if hit is None:
        ended = _over(scene) or scene.told("start failed")  # by its habits, before the blow
        return "" if ended else "nobody was hit"
    if it.number == signal.SIGKILL and not scene.shows(hit.dead):
        return f"{it.victim} is alive after SIGKILL"
    return ""


def _end(scene: Scene, it: Start) -> None:
    pause(it.lull_s)
    so.term(it.ending)(scene)


def main(argv: list[str]) -> int:
    """Play the runs; prints what was left and the longest way to the end; the exit code."""
    asked = asked_for(argv, play="starts", about=__doc__, what="run", count=300, plan_of=start_of)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # by a shell, in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    from stopbath.drill.conductor import conduct, turns

    scenarios = [scenario_of(f"{PREFIX}/{asked.seed}/{number}") for number in asked.numbers]
    todo = turns([it for it in scenarios if not it.why_not()], repeat=1, seed=0, controls=False)
    began = time.monotonic()
    results = list(conduct(todo, jobs=asked.jobs, on_result=_progress(len(todo))))
    _show(results, asked.seed, time.monotonic() - began)
    return int(not all(it.good for it in results))


def _progress(total: int) -> Callable[[Result], None]:
    done = 0

    def tell(_result: Result) -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{done} of {total}" + "\r\033[K" * (done == total))

    return tell


def _show(results: list[Result], seed: int, took_s: float) -> None:
    faces = Counter(it.face for it in results)
    bad = [it for it in results if not it.good]
    left = sum(1 for it in results if it.left)
    worst = max((it.took_s or it.bound_s for it in results), default=0.0)
    sys.stdout.write(
        f"starts: {len(results)} runs in {took_s:.0f} s, seed {seed}: "
        + ", ".join(f"{count} {face}" for face, count in sorted(faces.items()))
        + f"\nleft something behind: {left} (goal 0)\n"
        f"longest from the last blow to nothing left: {worst:.2f} s (bound {_BOUND_S:g} s)\n"
    )
    for it in bad:
        sys.stdout.write(f"  {it.id} {it.face}, {it.title}: {it.state}\n")
        for column, words in it.left.items():
            sys.stdout.writelines(f"    left: {column}: {word}\n" for word in words)
        sys.stdout.writelines(f"    {problem}\n" for problem in it.problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
