"""F23 to F26: stopping when everything around is gone, full or in the way."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING

from stopbath.drill import evidence as seen
from stopbath.drill import expectations as so
from stopbath.drill import injections as do
from stopbath.drill import terminal
from stopbath.drill.catalog.behind import LIBRARY_S, RUN_S, SERVE_S
from stopbath.drill.faces import act, answer_of, command, library, needs_server, post, server
from stopbath.drill.needs import full_device, own_pids
from stopbath.drill.scenario import Absent, Scenario

if TYPE_CHECKING:
    from stopbath.drill.scene import Scene

__all__ = ["ABSENT", "SCENARIOS"]

_library = partial(Scenario, face="library", bound_s=LIBRARY_S)

_run = partial(Scenario, face="run", bound_s=RUN_S)

_serve = partial(Scenario, face="serve", bound_s=SERVE_S, needs=(needs_server,))

_TERM, _INT, _HUP, _QUIT = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT

_PID_1 = ("unshare", "--pid", "--fork", "--mount-proc")


def _ended_itself(scene: Scene) -> str:
    """The run has ended though its graces are half a minute long."""
    if scene.shows(lambda: scene.exit_code() is not None):
        return ""
    return "the run goes on"


def _ignored_hangup(scene: Scene) -> str:
    """SIGHUP is ignored by the front process, as nohup has it."""
    mask = seen.mask(scene.ref("front").pid, "SigIgn")
    return "" if mask >> (_HUP - 1) & 1 else "SIGHUP is not ignored"


def _accepted(scene: Scene) -> None:
    """One request at work, one waiting; then the stop begins, and one more comes."""
    do.request("long", 20, harmless="long")(scene)
    scene.notes["waiting"] = post(scene, "waits", 2)
    if not scene.control:
        scene.ref("front").send(_TERM)


def _refused(scene: Scene) -> str:
    """New requests are refused, retryably, while the accepted ones go on."""

    def refused() -> bool:
        try:
            status, body = answer_of(post(scene))
        except OSError:
            return True  # nobody accepts connections any more
        scene.notes["refusal"] = status, body
        return status == 503  # noqa: PLR2004

    return "" if scene.shows(refused) else f"a late request got {scene.notes.get('refusal')}"


def _waiting_has_answer(scene: Scene) -> str:
    status, body = answer_of(scene.notes["waiting"])
    return "" if status in {200, 503} and body else f"the waiting request got {status}"


def _report_lost(scene: Scene) -> str:
    if scene.shows(lambda: "report could not be written" in scene.stderr()):
        return ""
    return "nobody said that the report could not be written"


SCENARIOS: tuple[Scenario, ...] = (
    # -- F23: the terminal is gone, nobody reads
    _library(
        id="F23a",
        title="nobody reads the program's stderr",
        injection="nobody reads",
        setup=library("words,deaf", "obedient", stderr="closed"),
        inject=do.nothing,
        verify=seen.broken_stderr,
        then=so.shutdown(2.0),
        expect=(so.in_time, so.ended("w0", "killed"), so.ended("w1", "drained")),
    ),
    _run(
        id="F23b",
        title="nobody reads the run's stderr",
        injection="nobody reads",
        setup=command("deaf", stderr="closed"),
        inject=do.nothing,
        verify=seen.broken_stderr,
        then=so.term(),
        expect=(so.exit_code(137),),
    ),
    _run(
        id="F23c",
        title="the terminal is closed",
        injection="the terminal is closed",
        setup=command("obedient", stderr="terminal"),
        inject=terminal.hang_up,
        verify=_ended_itself,
        expect=(so.exit_code(129),),
    ),
    _run(
        id="F23d",
        title="nohup: SIGHUP that was ignored stays ignored",
        injection="nohup",
        setup=do.unless_control(command("obedient", wrapper=("nohup",)), command("obedient")),
        inject=do.signals((_HUP,)),
        verify=_ignored_hangup,
        then=so.term(),
        expect=(so.exit_code(143),),
    ),
    _serve(
        id="F23e",
        title="the terminal is closed",
        injection="the terminal is closed",
        setup=server(stderr="terminal"),
        inject=terminal.hang_up,
        verify=_ended_itself,
        expect=(so.exit_code(0), so.ended("server", "drained")),
    ),
    # -- F24: PID 1
    _run(
        id="F24a",
        title="as PID 1, SIGTERM: everything ends inside the graces",
        injection="PID 1",
        setup=do.unless_control(command("deaf,stray", wrapper=_PID_1), command("deaf,stray")),
        inject=do.nothing,
        verify=seen.is_pid_1,
        then=do.kill_below("front", _TERM),
        needs=(own_pids,),
        expect=(so.exit_code(137),),
    ),
    _serve(
        id="F24b",
        title="as PID 1, SIGTERM: everything ends inside the graces",
        injection="PID 1",
        setup=do.unless_control(server("deaf", wrapper=_PID_1, named=False), server("deaf")),
        inject=do.nothing,
        verify=seen.is_pid_1,
        then=do.kill_below("front", _TERM),
        needs=(needs_server, own_pids),
        expect=(so.exit_code(0),),
    ),
    # -- F25: a drain that loses work
    _library(
        id="F25a",
        title="a worker finishes what it has accepted",
        injection="work in a drain",
        setup=library("obedient!finishes", graces=(2.0, 0.3, 1.0)),
        inject=so.shutdown(3.0),
        verify=seen.was_told("finished"),
        expect=(so.in_time, so.ended("w0", "drained")),
    ),
    _run(
        id="F25b",
        title="the command finishes what it has accepted",
        injection="work in a drain",
        setup=command("obedient!takes time", graces=(2.0, 0.3, 1.0)),
        inject=so.term(),
        verify=seen.was_told("finished"),
        expect=(so.exit_code(0),),
    ),
    _serve(
        id="F25c",
        title="requests at work and waiting are answered, new ones refused",
        injection="work in a drain",
        setup=server(drain_s=2.0),
        inject=_accepted,
        verify=_refused,
        bound_s=5.0,
        expect=(so.pictured, _waiting_has_answer, so.exit_code(0), so.ended("rank0", "drained")),
    ),
    # -- F26: the cleanup dies of its own error
    _library(
        id="F26a",
        title="every descriptor is used up",
        injection="EMFILE",
        bound_s=5.0,
        setup=act("no_descriptors", "obedient", "deaf"),
        inject=do.nothing,
        verify=seen.was_told("odd"),
        expect=(so.no_problems,),
    ),
    _library(
        id="F26b",
        title="the program's own callback raises",
        injection="a callback raises",
        bound_s=5.0,
        setup=act("callback_raises", "obedient", "deaf"),
        inject=do.nothing,
        verify=seen.was_told("odd"),
        expect=(so.no_problems,),
    ),
    *(
        make(
            id=f"F26{letter}",
            title="the disk that the report goes to is full",
            injection="ENOSPC",
            setup=do.unless_control(setup(report="/dev/full"), setup(report="")),
            inject=so.term(),
            verify=_report_lost,
            needs=needs,
            expect=(so.exit_code(code),),
        )
        for letter, make, setup, needs, code in (
            ("c", _run, partial(command, "obedient"), (full_device,), 143),
            ("d", _serve, server, (needs_server, full_device), 0),
        )
    ),
)

ABSENT: tuple[Absent, ...] = (
    Absent("F24", "library", "a program is not told to be PID 1 by the library; see run, serve"),
)
