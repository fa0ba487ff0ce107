"""F35 to F38: the unkillable, cancels, crowds and clocks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from stopbath.drill import evidence as seen
from stopbath.drill import expectations as so
from stopbath.drill import injections as do
from stopbath.drill.catalog.behind import LIBRARY_S, RUN_S, SERVE_S
from stopbath.drill.faces import act, answer_of, command, library, needs_server, post, server
from stopbath.drill.needs import freezer
from stopbath.drill.scenario import Absent, Scenario

if TYPE_CHECKING:
    from stopbath.drill.scene import Scene

__all__ = ["ABSENT", "SCENARIOS"]

_library = partial(Scenario, face="library", bound_s=LIBRARY_S)

_run = partial(Scenario, face="run", bound_s=RUN_S)

_serve = partial(Scenario, face="serve", bound_s=SERVE_S, needs=(needs_server,))

_STORM_S = 5.0


def _client_leaves(scene: Scene) -> None:
    """The client of a long request hangs up in the middle."""
    do.request("long", 1000, harmless="long")(scene)
    if not scene.control:
        scene.notes["request"].close()


def _next_answered(scene: Scene) -> None:
    scene.notes["answer"] = answer_of(post(scene, "the next", 4))


def _cancel_late(scene: Scene) -> None:
    """A request is aborted by its id just after it has finished, and the next one is at work."""
    first = post(scene, "first", 2)
    response = first.getresponse()
    ident = response.getheader("x-request-id") or "none"
    response.read()
    do.request("second", 60, harmless="second")(scene)
    if not scene.control:
        scene.notes["late cancel"] = do.delete(scene, f"/v1/requests/{ident}")


def _too_late(scene: Scene) -> str:
    """The abort found nothing to abort."""
    status = scene.notes.get("late cancel")
    return "" if status == 404 else f"the abort got {status}"  # noqa: PLR2004


def _note_answer(scene: Scene) -> None:
    scene.notes["answer"] = answer_of(scene.notes["request"])


SCENARIOS: tuple[Scenario, ...] = (
    # -- F35: what SIGKILL does not end
    _library(
        id="F35a",
        title="a worker is frozen: SIGKILL does not end it",
        injection="frozen",
        setup=library("obedient", "obedient"),
        inject=do.freeze("w0"),
        verify=seen.in_state("D", "w0"),
        then=so.shutdown(1.5),
        survivor="w0",
        needs=(freezer,),
        expect=(
            so.in_time,
            so.survived("w0"),
            so.ended("w0", "survived"),
            so.ended("w1", "drained"),
        ),
    ),
    _run(
        id="F35b",
        title="the command is frozen: SIGKILL does not end it",
        injection="frozen",
        setup=command("obedient", graces=(0.3, 0.3, 0.3)),
        inject=do.freeze("command"),
        verify=seen.in_state("D", "command"),
        then=so.term(),
        survivor="command",
        bound_s=4.0,
        needs=(freezer,),
        expect=(so.exit_code(125), so.survived("command")),
    ),
    _serve(
        id="F35c",
        title="a rank is frozen: SIGKILL does not end it",
        injection="frozen",
        setup=server(kill_s=0.3),
        inject=do.freeze("rank0"),
        verify=seen.in_state("D", "rank0"),
        then=so.term(),
        survivor="rank0",
        bound_s=6.0,
        needs=(needs_server, freezer),
        expect=(so.exit_code(5), so.survived("rank0")),
    ),
    # -- F36: cancel
    _serve(
        id="F36a",
        title="a client leaves: its request is given up, the next is answered",
        injection="a client leaves",
        setup=server(),
        inject=_client_leaves,
        verify=seen.was_told("cancelled", prompt="long"),
        then=do.both(_next_answered, so.term()),
        expect=(so.pictured, so.exit_code(0)),
    ),
    _serve(
        id="F36b",
        title="an abort that comes too late does not hit the next request",
        injection="a late abort",
        setup=server(),
        inject=_cancel_late,
        verify=_too_late,
        then=do.both(_note_answer, so.term()),
        expect=(so.pictured, so.exit_code(0)),
    ),
    # -- F37: many at once
    _library(
        id="F37a",
        title="64 deaf workers, one deadline",
        injection="64 at once",
        bound_s=8.0,
        setup=do.unless_control(library(*["deaf"] * 64), library("obedient")),
        inject=do.nothing,
        verify=seen.deaf("w63"),
        then=so.shutdown(3.0),
        expect=(so.in_time,),
    ),
    _library(
        id="F37b",
        title="a worker forks without end, from session to session",
        injection="a fork storm",
        bound_s=_STORM_S,
        setup=library("obedient!storm"),
        inject=do.nothing,
        verify=seen.was_told("storm"),
        then=so.shutdown(3.0),
    ),
    _run(
        id="F37c",
        title="the command forks without end, from session to session",
        injection="a fork storm",
        bound_s=_STORM_S,
        setup=command("obedient!storm"),
        inject=do.nothing,
        verify=seen.was_told("storm"),
        then=so.term(),
    ),
    _serve(
        id="F37d",
        title="a rank forks without end, from session to session",
        injection="a fork storm",
        bound_s=_STORM_S,
        setup=server("obedient!storm"),
        inject=do.nothing,
        verify=seen.was_told("storm"),
        then=so.term(),
    ),
    # -- F38: clocks
    _library(
        id="F38a",
        title="the wall clock goes back an hour in a stop",
        injection="a clock jump",
        bound_s=6.0,
        setup=act("clock_jumps", "deaf", "obedient"),
        inject=do.nothing,
        verify=seen.was_told("odd"),
        expect=(so.no_problems, so.in_time),
    ),
    _run(
        id="F38b",
        title="everything is suspended for 2 s",
        injection="suspended",
        setup=command("obedient"),
        inject=do.stop_for(2.0, "front", "keeper", "command"),
        verify=seen.noted("stopped"),
        then=so.term(),
        expect=(so.exit_code(143),),
    ),
    _serve(
        id="F38c",
        title="everything is suspended for 2 s at work",
        injection="suspended",
        setup=server(step_budget_s=1.0),
        inject=do.both(
            do.request("long", 300), do.stop_for(2.0, "front", "keeper", "server", "rank0")
        ),
        verify=seen.noted("stopped"),
        then=do.both(_note_answer, so.ask_status, so.term()),
        expect=(so.pictured, so.same_ranks, so.exit_code(0)),
    ),
)

ABSENT: tuple[Absent, ...] = (
    Absent("F36", "library", "a group carries no requests"),
    Absent("F36", "run", "a command's requests are its own"),
)
