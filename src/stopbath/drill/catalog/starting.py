"""F27 to F30: starting."""

from __future__ import annotations

import signal
from functools import partial

from stopbath.drill import evidence as seen
from stopbath.drill import expectations as so
from stopbath.drill import injections as do
from stopbath.drill.catalog.behind import KILLED_S, LIBRARY_S, RUN_S, SERVE_S
from stopbath.drill.faces import command, library, needs_server, server
from stopbath.drill.scenario import Absent, Scenario

__all__ = ["ABSENT", "SCENARIOS"]

_library = partial(Scenario, face="library", bound_s=LIBRARY_S)
_run = partial(Scenario, face="run", bound_s=RUN_S)
_serve = partial(Scenario, face="serve", bound_s=SERVE_S, needs=(needs_server,))
_TERM, _KILL = signal.SIGTERM, signal.SIGKILL
_SOON_S = 2.0  # "in about a second"

# fmt: off  (a scenario is a few rows of a table, not a column of one-word lines)
SCENARIOS = (
    # -- F27: a stop during the start, at any instant
    *(
        scenario
        for i, (number, how, bound_s) in enumerate(
            ((_TERM, "SIGTERM", SERVE_S), (_KILL, "SIGKILL", KILLED_S))
        )
        for scenario in (
            _library(
                id=f"F27{'ab'[i]}",
                title=f"{how} at a random instant of the first 0.5 s",
                injection=f"{how} at random",
                bound_s=KILLED_S,
                setup=library("deaf", "deaf,stray", "obedient", wait=""),
                inject=do.at_random((number,), 0.5),
                verify=seen.died("front", number=number),
            ),
            _run(
                id=f"F27{'cd'[i]}",
                title=f"{how} at a random instant of the first 0.5 s",
                injection=f"{how} at random",
                bound_s=min(bound_s, RUN_S),
                setup=command("deaf,stray", wait=False),
                inject=do.at_random((number,), 0.5),
                verify=seen.front_ended,
            ),
            _serve(
                id=f"F27{'ef'[i]}",
                title=f"{how} at a random instant of the first second",
                injection=f"{how} at random",
                bound_s=bound_s,
                setup=server("deaf,stray", wait=False),
                inject=do.at_random((number,), 1.0),
                verify=seen.front_ended,
            ),
        )
    ),
    # -- F28: one fails to start
    *(
        _library(
            id=f"F28{letter}",
            title=f"one worker {how}, its peers wait",
            injection=how,
            setup=library("obedient", f"obedient!{habit}", "deaf", wait="started"),
            inject=do.nothing,
            verify=seen.was_told("start failed"),
            then=so.end,
            expect=(so.failed_within(_SOON_S, "w1", *words),),
        )
        for letter, habit, how, words in (
            (
                "a",
                "raises at start",
                "raises at the start",
                ("no such checkpoint", "cannot open the checkpoint"),
            ),
            ("b", "killed at start", "is killed at the start", ("SIGKILL", "loading 3/10")),
        )
    ),
    _run(
        id="F28c",
        title="the command does not exist",
        injection="no such command",
        setup=do.unless_control(
            command("", argv=("/no/such/command",), wait=False), command("obedient")
        ),
        inject=do.nothing,
        verify=seen.front_ended,
        expect=(so.exit_code(127),),
    ),
    _run(
        id="F28d",
        title="the command may not be executed",
        injection="not executable",
        setup=do.unless_control(
            command("", argv=("/etc/passwd",), wait=False), command("obedient")
        ),
        inject=do.nothing,
        verify=seen.front_ended,
        expect=(so.exit_code(126),),
    ),
    _serve(
        id="F28e",
        title="a rank raises at the start",
        injection="raises at the start",
        setup=do.unless_control(server("raises at start", wait=False), server()),
        inject=do.await_told("raising"),
        verify=seen.was_told("raising"),
        then=do.nothing,
        expect=(so.exit_code(3), so.says("no such checkpoint", "cannot open the checkpoint")),
        bound_s=_SOON_S,
    ),
    # -- F29: the budget of a start
    _library(
        id="F29a",
        title="a load of 1.5 s reports progress: a budget of 0.8 s is enough",
        injection="a slow start",
        setup=library("obedient!progress at start", start_s=0.8),
        inject=do.nothing,
        verify=seen.was_slow(1.4),
        then=so.shutdown(2.0),
        expect=(so.in_time, so.ended("w0", "drained")),
    ),
    _library(
        id="F29b",
        title="a worker says nothing at the start: its budget ends it",
        injection="a mute start",
        setup=library("obedient!hangs at start", "obedient", start_s=0.8, wait="started"),
        inject=do.nothing,
        verify=seen.was_told("start failed"),
        then=so.end,
        expect=(so.failed_within(_SOON_S, "w0", "no progress"),),
    ),
    _library(
        id="F29c",
        title="a worker reports progress for ever: the hard cap ends it",
        injection="an endless start",
        setup=library("obedient!progress for ever", start_s=0.8, start_cap_s=1.2, wait="started"),
        inject=do.nothing,
        verify=seen.was_told("start failed"),
        then=so.end,
        expect=(so.failed_within(3.0, "w0", "loading for ever"),),
    ),
    _serve(
        id="F29d",
        title="a rank says nothing at the start: its budget of 0.8 s ends it",
        injection="a mute start",
        setup=do.unless_control(server("hangs at start", wait=False, start_s=0.8), server()),
        inject=do.await_told("mute"),
        verify=seen.was_told("mute"),
        then=do.nothing,
        expect=(so.exit_code(3), so.says("no progress")),
        bound_s=SERVE_S,
    ),
    # -- F30: crash loops
    _serve(
        id="F30a",
        title="a rank is killed again and again: restarted, then given up",
        injection="SIGKILL in a loop",
        bound_s=SERVE_S,
        setup=server(on_engine_death="restart", max_restarts=1),
        inject=do.kill_in_turns("rank0", 2),
        verify=seen.noted("killed"),
        then=do.nothing,
        expect=(so.exit_code(4), so.says("is restarted in", "not restarted again")),
    ),
)
# fmt: on

ABSENT = (
    Absent("F29", "run", "a command is ready as soon as it runs"),
    Absent("F30", "library", "a group restarts nobody"),
    Absent("F30", "run", "a command is not restarted"),
)
