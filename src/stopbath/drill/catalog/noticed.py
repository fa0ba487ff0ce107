"""F10 to F14: death that is not noticed, or noticed wrongly."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from stopbath.drill import evidence as seen
from stopbath.drill import expectations as so
from stopbath.drill import injections as do
from stopbath.drill.catalog.behind import KILLED_S, LIBRARY_S, RUN_S, SERVE_S
from stopbath.drill.faces import answer_of, command, get, library, needs_server, post, server
from stopbath.drill.scenario import Absent, Scenario

if TYPE_CHECKING:
    from stopbath.drill.scene import Scene

__all__ = ["ABSENT", "SCENARIOS"]

_library = partial(Scenario, face="library", bound_s=LIBRARY_S)

_run = partial(Scenario, face="run", bound_s=RUN_S)

_serve = partial(Scenario, face="serve", bound_s=SERVE_S, needs=(needs_server,))

_AT_ONCE_S = 0.25  # the promise is milliseconds; this host may be busy


def _note_answer(scene: Scene) -> None:
    scene.notes["answer"] = answer_of(scene.notes["request"])


def _unready_paths(scene: Scene) -> None:
    """Note what every path that matters says."""
    scene.until(lambda: get(scene, "/health/ready")[0] == 503, 1.0)  # noqa: PLR2004
    scene.notes["paths"] = {
        path: get(scene, path) for path in ("/health", "/health/ready", "/health/live")
    }
    scene.notes["late request"] = answer_of(post(scene))


def _paths_tell(scene: Scene) -> str:
    paths = scene.notes["paths"]
    codes = [paths[path][0] for path in ("/health", "/health/ready", "/health/live")]
    if codes != [503, 503, 200]:
        return f"health, ready and live say {codes}"
    if "SIGKILL" not in str(paths["/health/ready"][1]):
        return f"the cause is missing: {paths['/health/ready'][1]}"
    status, _ = scene.notes["late request"]
    return "" if status in {500, 503} else f"a request after the death got {status}"


def _queue_two(scene: Scene) -> None:
    """One request at work and one that waits."""
    do.request("long", 1000)(scene)
    scene.notes["waiting"] = post(scene, "waits", 4)


def _waiting_answered(scene: Scene) -> str:
    status, body = answer_of(scene.notes["waiting"])
    return "" if status in {500, 503} and body.get("error") else f"who waited got {status} {body}"


def _note_alive(scene: Scene) -> None:
    scene.notes["alive"] = scene.state_of("command") not in {"", "Z"}


def _was_alive(scene: Scene) -> str:
    return "" if scene.notes["alive"] else "the command had ended"


SCENARIOS: tuple[Scenario, ...] = (
    # -- F10: health says yes, the engine is dead
    _serve(
        id="F10a",
        title="a rank is killed (-9): ready is 503 with the cause, live 200",
        injection="SIGKILL",
        setup=server(on_engine_death="hold"),
        inject=do.kill("rank0"),
        verify=seen.died("rank0"),
        then=do.both(_unready_paths, so.term()),
        expect=(_paths_tell, so.exit_code(4)),
    ),
    # -- F11: requests that hang after a death
    _serve(
        id="F11a",
        title="a rank is killed (-9) at work: one typed error, names rank and signal",
        injection="SIGKILL",
        setup=server(),
        inject=do.both(_queue_two, do.kill("rank0")),
        verify=seen.died("rank0"),
        then=_note_answer,
        expect=(so.answered("worker_died", "rank0", "SIGKILL"), _waiting_answered, so.exit_code(4)),
    ),
    _serve(
        id="F11b",
        title="the server is killed (-9) at work: clients see the end at once",
        injection="SIGKILL",
        bound_s=KILLED_S,
        setup=server(),
        inject=do.both(_queue_two, do.kill("server")),
        verify=seen.died("server"),
        then=_note_answer,
        expect=(so.exit_code(4),),
    ),
    # -- F12: a killed peer poisons what it shared
    _library(
        id="F12a",
        title="a worker is killed (-9) in the middle of a frame; its peers drain",
        injection="SIGKILL",
        setup=library("floods", "obedient", policy="independent"),
        inject=do.both(do.heard("flooding"), do.kill("w0")),
        verify=seen.died("w0"),
        then=so.shutdown(2.0),
        expect=(so.in_time, so.ended("w1", "drained")),
    ),
    _serve(
        id="F12b",
        title="one of two ranks is killed (-9) at work",
        injection="SIGKILL",
        setup=server(ranks=2),
        inject=do.both(do.request("long", 1000), do.kill("rank1")),
        verify=seen.died("rank1"),
        then=_note_answer,
        expect=(so.answered("worker_died", "rank1", "SIGKILL"), so.exit_code(4)),
    ),
    # -- F13: the death is hidden by a forked child
    _library(
        id="F13a",
        title="a killed worker's forked child holds all its descriptors",
        injection="has children",
        setup=library("obedient!helper", "obedient"),
        inject=do.nothing,
        verify=seen.outside("helper"),
        then=do.both(do.timed_kill("w0"), do.heard("cause"), so.shutdown(2.0)),
        expect=(so.noticed_within(_AT_ONCE_S), so.cause("w0", "SIGKILL")),
    ),
    _run(
        id="F13b",
        title="a killed command's forked child holds its pipes",
        injection="has children",
        setup=command("obedient!helper", options=("--capture",)),
        inject=do.nothing,
        verify=seen.outside("helper"),
        then=do.kill("command"),
        bound_s=KILLED_S,
        expect=(so.exit_code(137),),
    ),
    _serve(
        id="F13c",
        title="a killed rank's forked child holds its channels",
        injection="has children",
        setup=server("obedient!helper", on_engine_death="hold"),
        inject=do.nothing,
        verify=seen.outside("helper"),
        then=do.both(do.kill("rank0"), _unready_paths, so.term()),
        expect=(_paths_tell, so.exit_code(4)),
    ),
    # -- F14: a healthy process declared dead
    _library(
        id="F14a",
        title="a worker holds the interpreter in C for 1.5 s",
        injection="sits in C",
        setup=library("obedient!in C for a while", "obedient"),
        inject=do.nothing,
        verify=seen.was_told("in C"),
        then=do.both(do.heard("out of C"), so.look, so.shutdown(2.0)),
        expect=(so.same_workers, so.in_time),
    ),
    _library(
        id="F14b",
        title="the program is stopped for 3 s",
        injection="stopped for a while",
        setup=library("obedient", "obedient"),
        inject=do.stop_for(3.0, "front"),
        verify=seen.noted("stopped"),
        then=do.both(so.look, so.shutdown(2.0)),
        expect=(so.same_workers, so.in_time),
    ),
    _run(
        id="F14c",
        title="the guardian is stopped for 3 s",
        injection="stopped for a while",
        setup=command("obedient"),
        inject=do.stop_for(3.0, "front"),
        verify=seen.noted("stopped"),
        then=do.both(_note_alive, so.term()),
        expect=(_was_alive, so.exit_code(143)),
    ),
    _serve(
        id="F14d",
        title="the server is stopped for 3 s at work: same pids, no restart",
        injection="stopped for a while",
        setup=server(step_budget_s=1.0),
        inject=do.both(do.request("long", 600), do.stop_for(3.0, "server")),
        verify=seen.noted("stopped"),
        then=do.both(_note_answer, so.ask_status, so.term()),
        expect=(so.pictured, so.same_ranks, so.exit_code(0)),
    ),
    _serve(
        id="F14e",
        title="a rank holds the interpreter in C for 1.5 s",
        injection="sits in C",
        setup=server(),
        inject=do.request("in C for a while"),
        verify=seen.was_told("in C"),
        then=do.both(_note_answer, so.ask_status, so.term()),
        expect=(so.pictured, so.same_ranks, so.exit_code(0)),
    ),
)

ABSENT: tuple[Absent, ...] = (
    Absent("F10", "library", "the group's cause is the program's to show: no health endpoint"),
    Absent("F10", "run", "a command's health endpoint is its own"),
    Absent("F11", "library", "a group carries no requests"),
    Absent("F11", "run", "a command's requests are its own"),
    Absent("F12", "run", "a command's channels are its own"),
)
