"""F05 and F06: shared memory, ports and socket files that are left behind."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stopbath.drill import evidence as seen
from stopbath.drill import expectations as so
from stopbath.drill import injections as do
from stopbath.drill.catalog.behind import KILLED_S, LIBRARY_S, RUN_S, SERVE_S, same_port
from stopbath.drill.faces import command, library, needs_server, server
from stopbath.drill.scenario import Absent, Scenario

if TYPE_CHECKING:
    from stopbath.drill.scene import Scene

__all__ = ["ABSENT", "SCENARIOS", "segment_lives", "strangers_segment"]

_library = partial(Scenario, face="library", bound_s=LIBRARY_S)

_run = partial(Scenario, face="run", bound_s=RUN_S)

_serve = partial(Scenario, face="serve", bound_s=SERVE_S, needs=(needs_server,))


def _segment_name(scene: Scene) -> str:
    return f"drill-{scene.place.cookie}"


def _clean_segment(scene: Scene) -> None:
    path = Path("/dev/shm") / _segment_name(scene)  # noqa: S108
    scene.deferred.callback(lambda: path.unlink(missing_ok=True))


def _segment_exists(scene: Scene) -> str:
    if scene.shows(lambda: scene.told("segment")):
        return ""
    return "no segment was made"


def strangers_segment(scene: Scene) -> None:
    """Have a segment of somebody else's in use before the run begins."""
    path = Path("/dev/shm") / f"stranger-{scene.place.cookie}"  # noqa: S108
    path.write_bytes(b"somebody else's")
    scene.deferred.callback(lambda: path.unlink(missing_ok=True))
    with path.open("rb") as file:
        scene.notes["bystander"] = scene.prop(stdin=file)
    scene.notes["segment"] = path


def segment_lives(scene: Scene) -> str:
    """The segment of somebody else is still there."""
    return "" if scene.notes["segment"].exists() else "a stranger's segment was removed"


SCENARIOS: tuple[Scenario, ...] = (
    # -- F05: shared memory
    _library(
        id="F05a",
        title="killed (-9): no shared memory was ever made",
        injection="SIGKILL",
        bound_s=KILLED_S,
        setup=library("obedient", "obedient"),
        inject=do.kill("front"),
        verify=seen.died("front"),
    ),
    *(
        _run(
            id=f"F05{letter}",
            title=f"a command's shared memory: {how}",
            injection="leaves a segment",
            setup=do.both(_clean_segment, command("deaf!segment=drill-@", options=options)),
            inject=do.nothing,
            verify=_segment_exists,
            then=then,
            expect=(so.exit_code(137),),
        )
        for letter, how, options, then in (
            ("b", "SIGTERM, and it is deaf", (), so.term()),
            ("e", "killed (-9), --remove-inferred", ("--remove-inferred",), do.kill("command")),
        )
    ),
    _run(
        id="F05c",
        title="a stranger's segment survives the run",
        injection="SIGKILL",
        setup=do.both(strangers_segment, command("obedient")),
        inject=do.kill("command"),
        verify=seen.died("command"),
        expect=(segment_lives, so.bystander_lives),
    ),
    _serve(
        id="F05d",
        title="killed (-9) at work: no shared memory was ever made",
        injection="SIGKILL",
        bound_s=KILLED_S,
        setup=server(),
        inject=do.both(do.request("long", 1000), do.kill("rank0", "server", "front", gap_s=0)),
        verify=seen.died("front", "server", "rank0"),
    ),
    # -- F06: ports and socket files
    _library(
        id="F06a",
        title="a worker's port is held by a forked child",
        injection="holds a port",
        setup=library("obedient!listen"),
        inject=do.nothing,
        verify=seen.was_told("port"),
        then=do.kill("front"),
        bound_s=KILLED_S,
        expect=(so.port_free,),
    ),
    _run(
        id="F06b",
        title="a command's port is held by a forked child",
        injection="holds a port",
        setup=command("obedient!listen"),
        inject=do.nothing,
        verify=seen.was_told("port"),
        then=do.kill("command"),
        bound_s=KILLED_S,
        expect=(so.port_free,),
    ),
    _serve(
        id="F06c",
        title="guardian and keeper killed at work: the port is free at once",
        injection="two SIGKILL",
        bound_s=KILLED_S,
        setup=server("helper"),
        inject=do.both(do.request("long", 1000), do.kill("front", "keeper")),
        verify=seen.died("front", "keeper"),
        expect=(so.port_free, same_port),
    ),
)

ABSENT: tuple[Absent, ...] = ()
