"""F07: device memory that is held with no visible process, or by a stranger."""

from __future__ import annotations

from functools import partial

from stopbath.drill import expectations as so
from stopbath.drill import injections as do
from stopbath.drill import memory
from stopbath.drill.catalog.behind import KILLED_S, LIBRARY_S, RUN_S, SERVE_S
from stopbath.drill.faces import command, library, needs_server, server
from stopbath.drill.needs import gpu
from stopbath.drill.scenario import Absent, Scenario

__all__ = ["ABSENT", "SCENARIOS"]

_KEPT_S = 4.5  # the graces, two seconds that are waited for the driver, one of a busy machine

_COMMAND = partial(command, options=("--ledger", "on"))

_SERVER = partial(server, ledger=True)

_library = partial(Scenario, face="library", bound_s=LIBRARY_S)

_run = partial(Scenario, face="run", bound_s=RUN_S)

_serve = partial(Scenario, face="serve", bound_s=SERVE_S, needs=(needs_server,))

_PROGRAM = memory.ask_program(memory.RELEASE_S)

_kept_by = partial(memory.keeps, "named")

_kept_nameless = partial(memory.keeps, "nameless")

_STAYS = "a dead process's memory stays: it is named"

_NOBODYS = "memory stays that nobody is named for"

_HOLDS, _KEEPS, _FOREIGN = (
    "holds device memory",
    "the driver keeps device memory",
    "foreign device memory",
)

SCENARIOS: tuple[Scenario, ...] = (
    # -- a process that has to be killed holds some, and the driver takes its time
    _library(
        id="F07a",
        title="a deaf worker holds device memory",
        injection=_HOLDS,
        simulated=gpu,
        setup=memory.held_by(library, "deaf!", looks=False),
        inject=do.nothing,
        verify=memory.counted,
        then=memory.driver_is_late(memory.ask_program(2.0)),
        expect=(memory.waited, memory.told_back, memory.back, so.in_time),
    ),
    _run(
        id="F07b",
        title="a command holds device memory; guardian killed (-9)",
        injection=_HOLDS,
        simulated=gpu,
        bound_s=KILLED_S,
        setup=memory.held_by(command, "deaf!", looks=False),
        inject=do.nothing,
        verify=memory.counted,
        then=do.kill("front"),
        expect=(memory.back,),
    ),
    *(
        make(
            id=ident,
            title=f"a deaf {who} holds device memory",
            injection=_HOLDS,
            simulated=gpu,
            setup=memory.held_by(face, "deaf!", looks=True),
            inject=do.nothing,
            verify=memory.counted,
            then=memory.driver_is_late(so.term()),
            expect=(memory.waited, memory.reported_back, memory.back),
        )
        for ident, make, face, who in (
            ("F07c", _serve, _SERVER, "rank"),
            ("F07d", _run, _COMMAND, "command"),
        )
    ),
    # -- held with no visible process
    *(
        make(
            id=ident,
            title=title,
            injection=_KEEPS,
            simulated=memory.never_at_will,
            bound_s=_KEPT_S,
            setup=memory.held_by(
                face, "", looks=face is not library, simulated=memory.never_at_will
            ),
            inject=inject,
            verify=memory.kept,
            then=memory.let_go,
            expect=(named,),
        )
        for ident, make, face, title, inject, named in (
            ("F07e", _library, library, _STAYS, _kept_by(_PROGRAM), memory.told_holder),
            ("F07f", _run, _COMMAND, _STAYS, _kept_by(so.term()), memory.says_holder),
            ("F07g", _serve, _SERVER, _NOBODYS, _kept_nameless(so.term()), memory.says_nobody),
        )
    ),
    # -- held by a stranger
    *(
        make(
            id=ident,
            title="a stranger holds device memory: named",
            injection=_FOREIGN,
            simulated=memory.never_sure,
            setup=do.both(memory.stranger_holds, setup),
            inject=do.nothing,
            verify=memory.names_stranger,
            then=memory.named_then_term,
            expect=(memory.says_stranger, so.bystander_lives),
        )
        for ident, make, setup in (
            ("F07h", _run, _COMMAND("")),
            ("F07i", _serve, _SERVER("")),
        )
    ),
)

ABSENT: tuple[Absent, ...] = ()
