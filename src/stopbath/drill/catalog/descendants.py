"""F03 and F04: what processes have started, and left."""

from __future__ import annotations

from functools import partial

from stopbath.drill import evidence as seen
from stopbath.drill import expectations as so
from stopbath.drill import injections as do
from stopbath.drill.faces import command, library, needs_server, server
from stopbath.drill.scenario import Absent, Scenario

__all__ = ["ABSENT", "KILLED_S", "LIBRARY_S", "RUN_S", "SCENARIOS", "SERVE_S"]

# After a kill -9; of a stop by a deadline; of `run` and of `serve` when everything is deaf.
KILLED_S, LIBRARY_S, RUN_S, SERVE_S = 2.0, 3.0, 2.6, 3.6

_library = partial(Scenario, face="library", bound_s=LIBRARY_S)

_run = partial(Scenario, face="run", bound_s=RUN_S)

_serve = partial(Scenario, face="serve", bound_s=SERVE_S, needs=(needs_server,))


SCENARIOS: tuple[Scenario, ...] = (
    # -- F03: grandchildren
    _library(
        id="F03a",
        title="a worker with forked and multiprocessing children is killed (-9)",
        injection="has children",
        setup=library("obedient!helper,multiprocessing", "obedient"),
        inject=do.nothing,
        verify=seen.outside("helper"),
        then=do.both(do.kill("w0"), do.heard("cause"), so.shutdown(2.0)),
        expect=(so.cause("w0", "SIGKILL"),),
    ),
    _run(
        id="F03b",
        title="a command with children is killed (-9)",
        injection="has children",
        bound_s=KILLED_S,
        setup=command("obedient!helper"),
        inject=do.nothing,
        verify=seen.outside("helper"),
        then=do.kill("command"),
        expect=(so.exit_code(137),),
    ),
    _serve(
        id="F03c",
        title="a rank with children is killed (-9)",
        injection="has children",
        setup=server("obedient!helper"),
        inject=do.nothing,
        verify=seen.outside("helper"),
        then=do.kill("rank0"),
        expect=(so.exit_code(4), so.cause("rank0", "SIGKILL")),
    ),
    # -- F04: descendants that leave the tree
    *(
        scenario
        for letter, habit, how in (
            ("a", "stray", "setsid and double fork"),
            ("b", "erased", "setsid, double fork, environment erased"),
        )
        for scenario in (
            _library(
                id=f"F04{letter}",
                title=f"a worker's descendant left: {how}",
                injection=f"left the tree ({habit})",
                setup=library(f"obedient!{habit}"),
                inject=do.nothing,
                verify=seen.outside("stray"),
                then=so.shutdown(2.0),
                expect=(so.in_time, so.ended("w0", "drained")),
            ),
            _run(
                id=f"F04{chr(ord(letter) + 2)}",
                title=f"a command's descendant left: {how}",
                injection=f"left the tree ({habit})",
                setup=command(f"obedient!{habit}"),
                inject=do.nothing,
                verify=seen.outside("stray"),
                then=do.kill("command"),
                expect=(so.exit_code(137),),
            ),
            _serve(
                id=f"F04{chr(ord(letter) + 4)}",
                title=f"a rank's descendant left: {how}",
                injection=f"left the tree ({habit})",
                setup=server(f"obedient!{habit}"),
                inject=do.nothing,
                verify=seen.outside("stray"),
                then=so.term(),
                expect=(so.exit_code(0),),
            ),
        )
    ),
)

ABSENT: tuple[Absent, ...] = ()
