"""F08 and F09: zombies and locks that are left behind."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING

from stopbath.drill import evidence as seen
from stopbath.drill import expectations as so
from stopbath.drill import injections as do
from stopbath.drill.catalog.behind import LIBRARY_S, RUN_S, SERVE_S
from stopbath.drill.faces import command, library, needs_server, server
from stopbath.drill.needs import own_pids
from stopbath.drill.scenario import Absent, Scenario
from stopbath.lifecycle._process import read_stat

if TYPE_CHECKING:
    from stopbath.drill.scene import Scene

__all__ = ["ABSENT", "SCENARIOS"]

_library = partial(Scenario, face="library", bound_s=LIBRARY_S)

_run = partial(Scenario, face="run", bound_s=RUN_S)

_serve = partial(Scenario, face="serve", bound_s=SERVE_S, needs=(needs_server,))

_PID_1 = ("unshare", "--pid", "--fork", "--mount-proc")


def _orphans_ended(scene: Scene) -> str:
    """Orphans have ended; whether anybody has reaped them is another question."""

    def ended() -> bool:
        found = [read_stat(fact["pid"]) for fact in scene.told("zombie")]
        return len(found) == 5 and all(it is None or it.state == "Z" for it in found)  # noqa: PLR2004

    return "" if scene.shows(ended) else "no orphan has ended"


def _note_zombies(scene: Scene) -> None:
    """Give whoever has to reap a second, then note what nobody has reaped."""
    pids = [fact["pid"] for fact in scene.told("zombie")]
    scene.until(lambda: not any(map(read_stat, pids)), 1.0)
    scene.notes["zombies"] = [pid for pid in pids if read_stat(pid)]


def _reaped(scene: Scene) -> str:
    return f"zombies: {scene.notes['zombies']}" if scene.notes["zombies"] else ""


def _worker_reaped(scene: Scene) -> None:
    pid = scene.ref("w0").pid
    scene.until(lambda: read_stat(pid) is None, 1.0)
    scene.notes["zombies"] = [pid] if read_stat(pid) else []


def _no_zombie_below(scene: Scene) -> None:
    """Note zombies among the descendants of the front process."""

    def zombies() -> list[str]:
        return [word for word in scene.ledger().processes if word.split()[1] == "Z"]

    scene.until(lambda: not zombies(), 1.0)
    scene.notes["zombies"] = zombies()


def _record_lies_about(scene: Scene) -> str:
    """The run is dead and its record is not: nobody could take it away."""
    why = seen.died("front", "keeper")(scene)
    return why or ("" if list(scene.runtime.rglob("*.run")) else "there is no record")


def _swept(scene: Scene) -> str:
    code, text = scene.notes["sweep"]
    return "" if code == 0 else f"sweep ended with {code}: {text[-300:]}"


SCENARIOS: tuple[Scenario, ...] = (
    # -- F08: zombies
    _library(
        id="F08a",
        title="a worker is killed (-9): reaped while the others go on",
        injection="SIGKILL",
        setup=library("obedient", "obedient", policy="independent"),
        inject=do.kill("w0"),
        verify=seen.died("w0"),
        then=do.both(_worker_reaped, so.shutdown(2.0)),
        expect=(_reaped, so.in_time, so.ended("w1", "drained")),
    ),
    _run(
        id="F08b",
        title="a command's orphans end while it goes on",
        injection="orphans end",
        setup=command("obedient!zombies"),
        inject=do.nothing,
        verify=_orphans_ended,
        then=do.both(_note_zombies, so.term()),
        expect=(_reaped, so.exit_code(143)),
    ),
    _run(
        id="F08c",
        title="as PID 1: a command's orphans end while it goes on",
        injection="orphans end (PID 1)",
        setup=command("obedient!zombies", wrapper=_PID_1),
        inject=do.nothing,
        verify=seen.was_told("zombie"),
        needs=(own_pids,),
        then=do.both(_no_zombie_below, do.kill_below("front", signal.SIGTERM)),
        expect=(_reaped,),
    ),
    _serve(
        id="F08d",
        title="a rank is killed (-9): reaped before the server has left",
        injection="SIGKILL",
        setup=server("helper", on_engine_death="hold"),
        inject=do.kill("rank0"),
        verify=seen.died("rank0"),
        then=do.both(_no_zombie_below, so.term()),
        expect=(_reaped, so.exit_code(4)),
    ),
    # -- F09: stale locks and records
    *(
        make(
            id=f"F09{letter}",
            title="both holders killed in the same instant, then a sweep",
            injection="two SIGKILL at once",
            bound_s=6.0,
            setup=setup,
            inject=do.kill("front", "keeper", gap_s=0),
            verify=_record_lies_about,
            then=do.next_start,
            expect=(_swept,),
        )
        for letter, make, setup in (
            ("a", _library, library("obedient", "deaf")),
            ("b", _run, command("deaf,helper,stray")),
            ("c", _serve, server("deaf,helper,stray")),
        )
    ),
)

ABSENT: tuple[Absent, ...] = ()
