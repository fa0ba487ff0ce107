"""F19 to F22: stops that hang, and more than one signal."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING, Any

from stopbath.drill import evidence as seen
from stopbath.drill import expectations as so
from stopbath.drill import injections as do
from stopbath.drill import terminal
from stopbath.drill.catalog.behind import LIBRARY_S, RUN_S, SERVE_S
from stopbath.drill.faces import command, library, needs_server, server
from stopbath.drill.scenario import Absent, Scenario

if TYPE_CHECKING:
    from stopbath.drill.scene import Scene

__all__ = ["ABSENT", "SCENARIOS"]

_library = partial(Scenario, face="library", bound_s=LIBRARY_S)

_run = partial(Scenario, face="run", bound_s=RUN_S)

_serve = partial(Scenario, face="serve", bound_s=SERVE_S, needs=(needs_server,))

_LONG = (30.0, 30.0, 1.0)

_LONG_SERVE: dict[str, Any] = {"drain_s": 30.0, "terminate_s": 30.0, "kill_s": 1.0}

_TERM, _INT, _HUP, _QUIT = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT

_STORM = (_TERM, _INT, _HUP, _QUIT, signal.SIGUSR1, signal.SIGWINCH) * 20

_FORCED = tuple(128 + number for number in (_TERM, _INT, _HUP, _QUIT))


def _stopping(scene: Scene) -> None:
    scene.ask("shutdown")
    scene.let_go()
    scene.hear("stopping")


def _interrupted(scene: Scene) -> str:
    """The stop has been interrupted as often as it could tell."""

    def found() -> bool:
        told = scene.told("stopped")
        return bool(told) and told[-1]["interrupts"] > 0

    return "" if scene.shows(found) else "no interrupt arrived in the stop"


def _said_stopping(scene: Scene) -> str:
    """The guardian has said which stage it is in: the second of them."""
    if scene.shows(lambda: "stopping now" in scene.stderr() or "killing" in scene.stderr()):
        return ""
    return "nobody said that the stop was shortened"


def _ended_itself(scene: Scene) -> str:
    """The run has ended though its graces are half a minute long."""
    if scene.shows(lambda: scene.exit_code() is not None):
        return ""
    return "the run goes on"


SCENARIOS: tuple[Scenario, ...] = (
    # -- F19: the exit hangs
    _library(
        id="F19a",
        title="a worker leaves a thread that never ends",
        injection="a thread stays",
        setup=library("obedient!thread", "obedient"),
        inject=do.nothing,
        verify=seen.was_told("thread"),
        then=so.shutdown(2.0),
        expect=(so.in_time, so.ended("w0", "terminated", "killed")),
    ),
    _run(
        id="F19b",
        title="the command's exit waits for a thread that never ends",
        injection="a thread stays",
        setup=command("obedient!exit hangs"),
        inject=do.nothing,
        verify=seen.was_told("thread"),
        then=so.term(),
        expect=(so.exit_code(0, 137, 143), so.ended("command", "terminated", "killed")),
    ),
    _serve(
        id="F19c",
        title="a rank's exit waits for a thread that never ends",
        injection="a thread stays",
        setup=server("obedient!thread"),
        inject=do.nothing,
        verify=seen.was_told("thread"),
        then=so.term(),
        expect=(so.exit_code(0),),
    ),
    # -- F20: deaf to SIGTERM
    _library(
        id="F20a",
        title="a worker is stopped (SIGSTOP)",
        injection="SIGSTOP",
        setup=library("obedient", "obedient"),
        inject=do.stop("w0"),
        verify=seen.in_state("T", "w0"),
        then=so.shutdown(2.0),
        expect=(
            so.in_time,
            so.ended("w0", "terminated"),
            so.ended("w1", "drained"),
            so.steps("w0", "drain", "SIGTERM"),
        ),
    ),
    _library(
        id="F20b",
        title="a worker sits in C and holds the interpreter",
        injection="sits in C",
        setup=library("hangs in its handler!in C", "obedient"),
        inject=do.nothing,
        verify=seen.was_told("in C"),
        then=so.shutdown(2.0),
        expect=(so.in_time, so.ended("w0", "killed"), so.ended("w1", "drained")),
    ),
    _library(
        id="F20c",
        title="a worker's own handler hangs in its cleanup",
        injection="a handler hangs",
        setup=library("obedient!hangs in its handler"),
        inject=do.nothing,
        verify=seen.catches("w0"),
        then=so.shutdown(2.0),
        expect=(so.in_time, so.ended("w0", "killed")),
    ),
    _run(
        id="F20d",
        title="the command is stopped (SIGSTOP)",
        injection="SIGSTOP",
        setup=command("obedient"),
        inject=do.stop("command"),
        verify=seen.in_state("T", "command"),
        then=so.term(),
        expect=(so.exit_code(143),),
    ),
    _run(
        id="F20e",
        title="the command's handler hangs in its cleanup",
        injection="a handler hangs",
        setup=command("obedient!hangs in its handler"),
        inject=do.nothing,
        verify=seen.catches("command"),
        then=so.term(),
        expect=(so.exit_code(137), so.ended("command", "killed")),
    ),
    _serve(
        id="F20f",
        title="a rank is stopped (SIGSTOP) at work",
        injection="SIGSTOP",
        setup=server(),
        inject=do.both(do.request("long", 500), do.stop("rank0")),
        verify=seen.in_state("T", "rank0"),
        then=so.term(),
        expect=(so.exit_code(0), so.ended("rank0", "terminated", "killed")),
    ),
    _serve(
        id="F20g",
        title="a rank sits in C at work and holds the interpreter",
        injection="sits in C",
        setup=server("deaf"),
        inject=do.request("in C"),
        verify=seen.was_told("in C"),
        then=so.term(),
        expect=(so.exit_code(0), so.ended("rank0", "killed")),
    ),
    _serve(
        id="F20i",
        title="a rank sits in C: SIGQUIT stops now and shows where",
        injection="sits in C, for SIGQUIT",
        setup=server("deaf"),
        inject=do.request("in C"),
        verify=seen.was_told("in C"),
        then=so.term(_QUIT),
        expect=(
            so.exit_code(0),
            so.ended("rank0", "killed"),
            so.says("in hold_interpreter"),
        ),
    ),
    _serve(
        id="F20h",
        title="the server itself is stopped (SIGSTOP)",
        injection="SIGSTOP",
        bound_s=4.6,
        setup=server(),
        inject=do.stop("server"),
        verify=seen.in_state("T", "server"),
        then=so.term(),
        expect=(so.ended("server", "terminated", "drained", "killed"),),
    ),
    # -- F21: more than one signal
    _library(
        id="F21a",
        title="three Ctrl-C in the middle of a stop",
        injection="signals in a stop",
        setup=library("deaf", "deaf", graces=_LONG),
        inject=do.both(_stopping, do.signals((_INT,) * 3, gap_s=0.02)),
        verify=_interrupted,
        expect=(so.ended("w0", "killed"), so.ended("w1", "killed")),
    ),
    _run(
        id="F21b",
        title="three signals: the third kills",
        injection="signals in a stop",
        setup=command("deaf", graces=_LONG),
        inject=do.signals((_INT, _INT, _TERM), gap_s=0.05),
        verify=_ended_itself,
        expect=(so.exit_code(137),),
    ),
    _run(
        id="F21c",
        title="a storm of 120 signals",
        injection="a storm of signals",
        setup=command("deaf", graces=_LONG),
        inject=do.signals(_STORM),
        verify=_ended_itself,
        expect=(so.exit_code(137),),
    ),
    _serve(
        id="F21d",
        title="a second signal stops now",
        injection="signals in a stop",
        setup=server("deaf", **{**_LONG_SERVE, "terminate_s": 0.3}),
        inject=do.both(
            do.request("block", 500, harmless="block"), do.signals((_TERM, _INT), gap_s=0.05)
        ),
        verify=_said_stopping,
        expect=(so.exit_code(128 + _INT),),
    ),
    _serve(
        id="F21e",
        title="a third signal kills now",
        injection="signals in a stop",
        setup=server("deaf", **_LONG_SERVE),
        inject=do.signals((_TERM, _INT, _TERM), gap_s=0.05),
        verify=_said_stopping,
        expect=(so.exit_code(128 + _TERM),),
    ),
    _serve(
        id="F21f",
        title="a storm of 120 signals",
        injection="a storm of signals",
        setup=server("deaf", **_LONG_SERVE),
        inject=do.signals(_STORM),
        verify=_said_stopping,
        expect=(so.exit_code(*_FORCED),),
    ),
    # -- F22: the terminal's signal
    _library(
        id="F22a",
        title="Ctrl-C on the program's terminal: workers never see it",
        injection="Ctrl-C typed",
        setup=library("obedient", "obedient", graces=_LONG, stderr="terminal"),
        inject=terminal.keystroke(b"\x03"),
        verify=_ended_itself,
        expect=(so.exit_code(-_INT, 130, 1),),
    ),
    _run(
        id="F22b",
        title="Ctrl-C on the terminal reaches the command once",
        injection="Ctrl-C typed",
        setup=command("counts", stderr="terminal"),
        inject=terminal.keystroke(b"\x03"),
        verify=seen.was_told("heard", number=int(_INT)),
        expect=(so.exit_code(0),),
    ),
    _serve(
        id="F22c",
        title="Ctrl-C on the terminal: everybody drains",
        injection="Ctrl-C typed",
        setup=server(stderr="terminal"),
        inject=terminal.keystroke(b"\x03"),
        verify=_ended_itself,
        expect=(so.exit_code(0), so.ended("server", "drained"), so.ended("rank0", "drained")),
    ),
)

ABSENT: tuple[Absent, ...] = ()
