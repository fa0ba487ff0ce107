"""F15 to F18: parents, peers, exit codes and causes."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING

from stopbath.drill import evidence as seen
from stopbath.drill import expectations as so
from stopbath.drill import injections as do
from stopbath.drill.catalog.behind import KILLED_S, LIBRARY_S, RUN_S, SERVE_S
from stopbath.drill.faces import act, answer_of, command, library, needs_server, server
from stopbath.drill.needs import own_pids
from stopbath.drill.scenario import Absent, Scenario

if TYPE_CHECKING:
    from stopbath.drill.scene import Scene

__all__ = ["ABSENT", "SCENARIOS"]

_library = partial(Scenario, face="library", bound_s=LIBRARY_S)

_run = partial(Scenario, face="run", bound_s=RUN_S)

_serve = partial(Scenario, face="serve", bound_s=SERVE_S, needs=(needs_server,))

_PID_1 = ("unshare", "--pid", "--fork", "--mount-proc")

_SHELL = ("sh", "-c", '"$@" & exec sleep 600', "sh")

_WORDS = "an illegal memory access"


def _note_answer(scene: Scene) -> None:
    scene.notes["answer"] = answer_of(scene.notes["request"])


def _note_alive(scene: Scene) -> None:
    scene.notes["alive"] = scene.state_of("command") not in {"", "Z"}


def _was_alive(scene: Scene) -> str:
    return "" if scene.notes["alive"] else "the command had ended"


SCENARIOS: tuple[Scenario, ...] = (
    # -- F15: traps of the parent-death signal
    _library(
        id="F15a",
        title="the thread that started the workers ends",
        injection="the starting thread ends",
        setup=act("thread_that_ends"),
        inject=do.nothing,
        verify=seen.was_told("odd"),
        bound_s=5.0,
        expect=(so.no_problems,),
    ),
    _run(
        id="F15b",
        title="the shell in between is killed (-9)",
        injection="the parent ends",
        setup=command("obedient", wrapper=_SHELL),
        inject=do.kill("front"),
        verify=seen.died("front"),
        then=do.both(_note_alive, do.send_to("guardian", signal.SIGTERM)),
        expect=(_was_alive,),
    ),
    _serve(
        id="F15c",
        title="the shell in between is killed (-9)",
        injection="the parent ends",
        setup=server(wrapper=_SHELL),
        inject=do.kill("front"),
        verify=seen.died("front"),
        then=do.both(so.ask_status, do.send_to("guardian", signal.SIGTERM)),
        expect=(so.same_ranks,),
    ),
    _run(
        id="F15d",
        title="the guardian is PID 1 and is killed (-9)",
        injection="SIGKILL (PID 1)",
        bound_s=KILLED_S,
        setup=do.both(do.files_of_a_container, command("deaf,helper,stray", wrapper=_PID_1)),
        inject=do.kill_below("front"),
        verify=seen.died("below"),
        needs=(own_pids,),
        swept=True,
    ),
    # -- F16: one dies, the others sit in a collective
    _library(
        id="F16a",
        title="one worker dies (-9), its peer sits in C and is deaf",
        injection="SIGKILL",
        setup=library("obedient", "in C,deaf"),
        inject=do.kill("w0"),
        verify=seen.died("w0"),
        then=do.both(do.heard("cause"), so.shutdown(2.0)),
        expect=(so.cause("w0", "SIGKILL"), so.ended("w1", "killed")),
    ),
    _serve(
        id="F16b",
        title="a rank dies (-9), its peer blocks in a collective",
        injection="SIGKILL",
        setup=server(ranks=2),
        inject=do.both(do.request("block", 1000), do.kill("rank1")),
        verify=seen.died("rank1"),
        then=_note_answer,
        expect=(
            so.answered("worker_died", "rank1", "SIGKILL"),
            so.exit_code(4),
            so.cause("rank1", "SIGKILL"),
        ),
    ),
    # -- F17: exit codes that lie
    _library(
        id="F17a",
        title="the host ignores SIGCHLD",
        injection="SIGCHLD ignored",
        setup=act("children_ignored", "obedient", "deaf"),
        inject=do.nothing,
        verify=seen.was_told("odd"),
        bound_s=5.0,
        expect=(so.no_problems,),
    ),
    _run(
        id="F17b",
        title="SIGSEGV ends the command, SIGTERM follows at once",
        injection="SIGSEGV",
        bound_s=KILLED_S,
        setup=command("obedient"),
        inject=do.kill("command", number=signal.SIGSEGV),
        verify=seen.died("command"),
        then=so.term(),
        expect=(so.exit_code(139),),
    ),
    _serve(
        id="F17c",
        title="SIGSEGV ends a rank, SIGTERM follows at once",
        injection="SIGSEGV",
        setup=server(),
        inject=do.kill("rank0", number=signal.SIGSEGV),
        verify=seen.died("rank0"),
        then=so.term(),
        expect=(so.exit_code(4), so.cause("rank0", "SIGSEGV")),
    ),
    # -- F18: the root cause is lost
    _library(
        id="F18a",
        title="a worker says why and is killed (-9)",
        injection="SIGKILL",
        setup=library("words", "obedient"),
        inject=do.kill("w0"),
        verify=seen.died("w0"),
        then=do.both(do.heard("cause"), so.shutdown(2.0)),
        expect=(so.cause("w0", "SIGKILL", _WORDS),),
    ),
    _run(
        id="F18b",
        title="a command says why and is killed (-9)",
        injection="SIGKILL",
        bound_s=KILLED_S,
        setup=command("obedient", options=("--capture",)),
        inject=do.kill("command"),
        verify=seen.died("command"),
        expect=(so.cause("command", "SIGKILL", "the command is up"),),
    ),
    _serve(
        id="F18c",
        title="a rank says why and is killed (-9)",
        injection="SIGKILL",
        setup=server("words"),
        inject=do.kill("rank0"),
        verify=seen.died("rank0"),
        expect=(so.cause("rank0", "SIGKILL", _WORDS), so.says("rank0", "SIGKILL")),
    ),
)

ABSENT: tuple[Absent, ...] = (
    Absent("F16", "run", "what a command's processes do together is its own"),
)
