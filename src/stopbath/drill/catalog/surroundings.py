"""F31 to F34: bystanders and hosts."""

from __future__ import annotations

import signal
import sys
from functools import partial
from typing import TYPE_CHECKING

from stopbath.drill import evidence as seen
from stopbath.drill import expectations as so
from stopbath.drill import injections as do
from stopbath.drill.catalog.behind import KILLED_S, LIBRARY_S, RUN_S, SERVE_S
from stopbath.drill.catalog.resources import segment_lives, strangers_segment
from stopbath.drill.faces import act, command, library, needs_server, server
from stopbath.drill.scenario import Absent, Scenario

if TYPE_CHECKING:
    from stopbath.drill.scene import Scene

__all__ = ["ABSENT", "SCENARIOS"]

_library = partial(Scenario, face="library", bound_s=LIBRARY_S)

_run = partial(Scenario, face="run", bound_s=RUN_S)

_serve = partial(Scenario, face="serve", bound_s=SERVE_S, needs=(needs_server,))

# A bystander that looks exactly like the command, but for who it is.
_DOUBLE = (sys.executable, "-c", "import signal; signal.pause()", "stopbath.drill.commands", "deaf")


def _odd_start(scene: Scene) -> str:
    """The guardian was started as by a program that blocks everything and ignores SIGALRM."""
    ignored = seen.mask(scene.ref("front").pid, "SigIgn")
    return "" if ignored >> (signal.SIGALRM - 1) & 1 else "nothing is ignored"


def _unblocked(scene: Scene) -> str:
    told = scene.told("signals")
    return "" if told and not int(told[-1]["mask"], 16) else f"blocked: {told[-1:]}"


def _by_default(scene: Scene) -> str:
    """A rank ignores what Python (SIGPIPE, SIGXFSZ) and the C library (32, 33) ignore."""
    told = scene.told("signals")
    ours = 1 << 12 | 1 << 24 | 3 << 31
    return "" if told and not told[-1]["ignored"] & ~ours else f"ignored: {told[-1:]}"


_ODD = (
    sys.executable,
    "-c",
    (
        "import os, signal, sys; signal.pthread_sigmask(0, signal.valid_signals());"
        "signal.signal(signal.SIGALRM, signal.SIG_IGN); os.execvp(sys.argv[1], sys.argv[1:])"
    ),
)

_HOSTS = (
    ("a", "in_asyncio", "inside asyncio, with the host's own SIGTERM handler", "asyncio"),
    ("b", "twice_and_nested", "two groups at once, nested, and a second start", "nested groups"),
    ("c", "after_fork", "a forked child owns nothing of its parent's group", "a fork"),
    ("d", "no_stop", "the interpreter ends without a stop", "no stop"),
)


SCENARIOS: tuple[Scenario, ...] = (
    # -- F31: innocents
    *(
        make(
            id=f"F31{letter}",
            title="a bystander with the same command line lives on",
            injection="SIGKILL",
            setup=do.both(do.innocent(_DOUBLE), setup),
            bound_s=KILLED_S,
            inject=do.kill("front"),
            verify=seen.died("front"),
            expect=(so.bystander_lives,),
        )
        for letter, make, setup in (
            ("a", _library, library("deaf")),
            ("b", _run, command("deaf")),
            ("c", _serve, server("deaf")),
        )
    ),
    _run(
        id="F31d",
        title="a record names a pid that is another process by now",
        injection="a reused pid",
        setup=do.both(do.innocent(_DOUBLE), command("obedient")),
        inject=do.false_record,
        verify=seen.has_false_record,
        then=do.both(do.next_start, so.term()),
        bound_s=6.0,
        expect=(so.bystander_lives,),
    ),
    # -- F32: a stranger's shared memory
    _run(
        id="F32a",
        title="a command that has a stranger's live segment mapped is killed (-9)",
        injection="maps a stranger's segment",
        setup=do.both(strangers_segment, command("obedient!attach=stranger-@")),
        inject=do.nothing,
        verify=seen.was_told("attached"),
        then=do.kill("command"),
        expect=(segment_lives, so.bystander_lives),
    ),
    # -- F33: library manners
    *(
        _library(
            id=f"F33{letter}",
            title=title,
            injection=injection,
            bound_s=6.0,
            setup=act(name, "obedient", "deaf"),
            inject=do.nothing,
            verify=seen.was_told("odd"),
            expect=(so.no_problems,),
        )
        for letter, name, title, injection in _HOSTS
    ),
    # -- F34: inherited handlers
    _library(
        id="F34a",
        title="a signal to a worker runs no handler of the host",
        injection="a wake-up descriptor",
        bound_s=6.0,
        setup=act("touched_nothing"),
        inject=do.nothing,
        verify=seen.was_told("odd"),
        expect=(so.no_problems,),
    ),
    _run(
        id="F34b",
        title="started with every signal blocked",
        injection="signals blocked",
        setup=do.unless_control(command("dispositions", wrapper=_ODD), command("dispositions")),
        inject=do.nothing,
        verify=_odd_start,
        then=so.term(),
        expect=(_unblocked, so.exit_code(143)),
    ),
    _serve(
        id="F34c",
        title="started with every signal blocked",
        injection="signals blocked",
        setup=do.unless_control(server("dispositions", wrapper=_ODD), server("dispositions")),
        inject=do.nothing,
        verify=_odd_start,
        then=so.term(),
        expect=(_unblocked, _by_default, so.exit_code(0)),
    ),
)

ABSENT: tuple[Absent, ...] = (
    Absent("F32", "library", "the layer attaches to no segment; F05a: it makes none"),
    Absent("F32", "serve", "tensors travel as descriptors: F05d shows that there is no segment"),
    Absent("F33", "run", "guardian and keeper are our own processes: there is no host"),
    Absent("F33", "serve", "guardian and keeper are our own processes: there is no host"),
)
