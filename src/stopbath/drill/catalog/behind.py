"""F01 and F02: processes that are left behind."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING

from stopbath.drill import evidence as seen
from stopbath.drill import expectations as so
from stopbath.drill import injections as do
from stopbath.drill.faces import command, get, library, needs_server, server
from stopbath.drill.needs import option
from stopbath.drill.scenario import Absent, Scenario

if TYPE_CHECKING:
    from stopbath.drill.scene import Scene

__all__ = ["ABSENT", "KILLED_S", "LIBRARY_S", "RUN_S", "SCENARIOS", "SERVE_S", "same_port"]

# After a kill -9; of a stop by a deadline; of `run` and of `serve` when everything is deaf.
KILLED_S, LIBRARY_S, RUN_S, SERVE_S = 2.0, 3.0, 2.6, 3.6

_library = partial(Scenario, face="library", bound_s=LIBRARY_S)

_run = partial(Scenario, face="run", bound_s=RUN_S)

_serve = partial(Scenario, face="serve", bound_s=SERVE_S, needs=(needs_server,))

_LONG = (30.0, 30.0, 1.0)


def _of_two(first: str, second: str) -> str:
    return f"{first} and 30 ms later {second} killed (-9)"


def same_port(scene: Scene) -> str:
    """A second server takes the same port at once."""
    from stopbath.drill.faces import await_ready, start_server

    port = scene.notes["port"]
    for name in ("front", "keeper", "server", "rank0"):
        scene.refs.pop(name).close()
    scene.report_file.unlink(missing_ok=True)
    (scene.folder / "stderr").unlink()
    start_server(scene, (), ranks=1, wrapper=(), stderr="", report="", config={"port": port})
    await_ready(scene)
    status, _ = get(scene, "/health/ready")
    scene.ref("front").send(signal.SIGTERM)
    code = scene.exit_code(5)
    return "" if (status, code) == (200, 0) else f"the second server: {status}, exit code {code}"


SCENARIOS: tuple[Scenario, ...] = (
    # -- F01: a stop that leaves workers
    _library(
        id="F01a",
        title="one worker ignores SIGTERM",
        injection="ignores SIGTERM",
        setup=library("obedient", "!deaf"),
        inject=do.nothing,
        verify=seen.deaf("w1"),
        then=so.shutdown(2.0),
        expect=(
            so.in_time,
            so.ended("w1", "killed"),
            so.ended("w0", "drained"),
            so.steps("w1", "drain", "SIGTERM", "SIGKILL"),
        ),
    ),
    _library(
        id="F01b",
        title="one worker raises in its stop path",
        injection="raises in its stop",
        setup=library("obedient", "!raises at stop"),
        inject=so.shutdown(2.0),
        verify=seen.was_told("raising"),
        expect=(so.in_time, so.ended("w0", "drained")),
    ),
    _library(
        id="F01c",
        title="one worker is dead already, another deaf",
        injection="SIGKILL",
        setup=library("obedient", "deaf", "obedient", policy="independent"),
        inject=do.kill("w0"),
        verify=seen.died("w0"),
        then=so.shutdown(2.0),
        expect=(
            so.in_time,
            so.ended("w0", "exited"),
            so.ended("w1", "killed"),
            so.ended("w2", "drained"),
        ),
    ),
    _library(
        id="F01d",
        title="the line over which a worker is asked is shut",
        injection="shuts its line",
        setup=library("obedient", "!closes its line"),
        inject=do.nothing,
        verify=seen.was_told("closed its line"),
        then=so.shutdown(2.0),
        expect=(so.in_time, so.ended("w0", "drained")),
    ),
    _run(
        id="F01e",
        title="Ctrl-C, and the command ignores it",
        injection="ignores SIGTERM",
        setup=command("!deaf"),
        inject=do.nothing,
        verify=seen.deaf("command"),
        then=so.term(signal.SIGINT),
        expect=(so.exit_code(137), so.ended("command", "killed")),
    ),
    _serve(
        id="F01f",
        title="SIGTERM, and a rank ignores it",
        injection="ignores SIGTERM",
        setup=server("!deaf"),
        inject=do.nothing,
        verify=seen.deaf("rank0"),
        then=so.term(),
        expect=(so.exit_code(0), so.ended("rank0", "killed"), so.ended("server", "drained")),
    ),
    # -- F02: the launcher is killed
    _library(
        id="F02a",
        title="the program is killed (-9)",
        injection="SIGKILL",
        bound_s=KILLED_S,
        setup=library("deaf", "deaf,helper,stray"),
        inject=do.kill("front"),
        verify=seen.died("front"),
    ),
    _library(
        id="F02b",
        title="the keeper is killed (-9)",
        injection="SIGKILL",
        bound_s=KILLED_S,
        setup=library("deaf", "deaf"),
        inject=do.kill("keeper"),
        verify=seen.died("keeper"),
        then=so.end,
    ),
    _library(
        id="F02c",
        title=_of_two("the program", "its keeper"),
        injection="two SIGKILL",
        bound_s=KILLED_S,
        swept=True,
        setup=library("deaf", "deaf,helper"),
        inject=do.kill("front", "keeper"),
        verify=seen.died("front", "keeper"),
    ),
    _library(
        id="F02d",
        title=_of_two("the keeper", "its program"),
        injection="two SIGKILL",
        bound_s=KILLED_S,
        swept=True,
        setup=library("deaf", "deaf"),
        inject=do.kill("keeper", "front"),
        verify=seen.died("keeper", "front"),
    ),
    _library(
        id="F02e",
        title="the program is killed (-9) while workers start",
        injection="SIGKILL",
        bound_s=KILLED_S,
        setup=library("hangs at start", "hangs at start", wait="mute"),
        inject=do.kill("front"),
        verify=seen.died("front"),
    ),
    _library(
        id="F02f",
        title="the program is killed (-9) in the middle of a stop",
        injection="SIGKILL",
        bound_s=KILLED_S,
        setup=library("deaf", "deaf,stray", graces=_LONG),
        inject=do.both(so.shutdown(), do.heard("stopping"), do.kill("front")),
        verify=seen.died("front"),
    ),
    _run(
        id="F02g",
        title="the guardian is killed (-9)",
        injection="SIGKILL",
        bound_s=KILLED_S,
        setup=command("deaf,helper,stray"),
        inject=do.kill("front"),
        verify=seen.died("front"),
    ),
    _run(
        id="F02h",
        title="the keeper is killed (-9)",
        injection="SIGKILL",
        bound_s=KILLED_S,
        setup=command("deaf,helper,stray", graces=_LONG),
        inject=do.kill("keeper"),
        verify=seen.died("keeper"),
        expect=(so.exit_code(125),),
    ),
    _run(
        id="F02i",
        title=_of_two("guardian", "keeper"),
        injection="two SIGKILL",
        bound_s=KILLED_S,
        swept=True,
        setup=command("deaf,helper,stray"),
        inject=do.kill("front", "keeper"),
        verify=seen.died("front", "keeper"),
    ),
    _run(
        id="F02j",
        title=_of_two("keeper", "guardian"),
        injection="two SIGKILL",
        bound_s=KILLED_S,
        swept=True,
        setup=command("deaf,helper,stray"),
        inject=do.kill("keeper", "front"),
        verify=seen.died("keeper", "front"),
    ),
    _run(
        id="F02k",
        title="the guardian is killed (-9) in the middle of a stop",
        injection="SIGKILL",
        bound_s=KILLED_S,
        setup=command("deaf,stray", graces=_LONG),
        inject=do.both(so.term(), do.kill("front")),
        verify=seen.died("front"),
    ),
    _run(
        id="F02l",
        title="guardian and keeper killed in the same instant, --isolate pid",
        injection="two SIGKILL at once",
        bound_s=KILLED_S,
        swept=True,
        setup=command("deaf,helper,stray", options=("--isolate", "pid")),
        inject=do.kill("front", "keeper", gap_s=0),
        verify=seen.died("front", "keeper"),
        needs=(partial(option, "--isolate"),),
    ),
    _serve(
        id="F02m",
        title="the server is killed (-9)",
        injection="SIGKILL",
        bound_s=KILLED_S,
        setup=server("deaf,helper,stray"),
        inject=do.kill("server"),
        verify=seen.died("server"),
        expect=(so.exit_code(4), so.cause("server", "SIGKILL"), same_port),
    ),
    _serve(
        id="F02n",
        title="the guardian is killed (-9), then started again",
        injection="SIGKILL",
        bound_s=KILLED_S,
        setup=server("deaf,helper,stray"),
        inject=do.kill("front"),
        verify=seen.died("front"),
        expect=(same_port,),
    ),
    _serve(
        id="F02o",
        title="the keeper is killed (-9)",
        injection="SIGKILL",
        bound_s=KILLED_S,
        setup=server("deaf,helper,stray"),
        inject=do.kill("keeper"),
        verify=seen.died("keeper"),
        expect=(so.exit_code(4),),
    ),
    *(
        _serve(
            id=f"F02{letter}",
            title=_of_two(first.replace("front", "guardian"), second.replace("front", "guardian")),
            injection="two SIGKILL",
            bound_s=KILLED_S,
            setup=server("deaf,helper,stray"),
            inject=do.kill(first, second),
            verify=seen.died(first, second),
            swept="front" in {first, second},
        )
        for letter, first, second in (
            ("p", "front", "keeper"),
            ("q", "keeper", "front"),
            ("r", "server", "front"),
            ("s", "server", "keeper"),
            ("t", "rank0", "keeper"),
            ("u", "keeper", "server"),
        )
    ),
)

ABSENT: tuple[Absent, ...] = ()
