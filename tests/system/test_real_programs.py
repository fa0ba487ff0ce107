"""Real programs under `stopbath run`: whatever ends them, nothing of theirs is left.

What a tree had while it lived, processes that reparented themselves, ports, socket files and
shared memory included, is looked at before the fault, and must be gone at the bound.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from programs import PATH, PROGRAMS, Place, Program

from observing import wait_until
from stopbath.lifecycle import Deadline
from wrapped import Holdings, Wrapped, wrapping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("nothing_left")

GRACES = ("--drain", "4", "--terminate", "2", "--kill", "2")
STOP_S = 4 + 2 + 2 + 1.0  # the graces, and a second for a machine that is busy
DEATH_S = 3.0  # of ours, or of the command: strays get SIGTERM, then SIGKILL


@pytest.fixture
def wrap(nothing_left: None, tmp_path: Path) -> Iterator[Callable[..., Wrapped]]:  # noqa: ARG001  (runs around this)
    yield from wrapping(tmp_path)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    one = Place(tmp_path)
    yield one
    one.clear()


def up(wrap: Callable[..., Wrapped], program: Program, place: Place, **how: Any) -> Wrapped:
    """Start it; it works, has the processes it should have, and its sockets are known.

    They are looked for on a schedule that backs off: what was bound since the last look is not
    proved to anybody when the command is killed.
    """
    if why := program.missing():
        pytest.skip(why)
    run = wrap(*program.argv(place), env={"PATH": PATH}, **how)
    by = Deadline.after(program.start_s)

    def works() -> bool:
        assert run.process.poll() is None, run.errors + run.out.read_text()
        if not program.up(run, place):
            return False
        held = Holdings.of(run)
        grown = len(held.pids) >= 2 + program.processes and len(held.sockets) >= program.sockets
        return grown and all(map(run.recorded, held.sockets))

    wait_until(works, by, f"{program.name} works: {run.errors}")
    return run


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda it: it.name)
@pytest.mark.parametrize("fault", ["ctrl-c", "SIGTERM", "kill -9 of us", "kill -9 of it"])
def test_nothing_is_left(
    wrap: Callable[..., Wrapped], place: Place, program: Program, fault: str
) -> None:
    run = up(wrap, program, place, options=GRACES, terminal=True)
    held = Holdings.of(run)
    began = time.monotonic()
    if fault == "ctrl-c":
        run.ctrl_c()
    elif fault == "SIGTERM":
        run.send(signal.SIGTERM)
    elif fault == "kill -9 of us":
        run.send(signal.SIGKILL)
    else:
        os.kill(run.command, signal.SIGKILL)
    bound_s = STOP_S if fault in {"ctrl-c", "SIGTERM"} else DEATH_S
    code = run.ended(STOP_S)
    held.are_gone(max(0.5, bound_s - (time.monotonic() - began)))
    if fault == "kill -9 of us":
        assert code == -signal.SIGKILL
        return
    assert run.report["survivors"] == []
    assert run.report["exit_code"] == code
    if fault == "kill -9 of it":
        assert code == 128 + signal.SIGKILL
    else:
        assert run.report["asked_by"] == ("SIGINT" if fault == "ctrl-c" else "SIGTERM")


def test_a_rank_that_dies_in_an_all_reduce_ends_the_run_by_watch(
    wrap: Callable[..., Wrapped], place: Place
) -> None:
    """What runs it would end the peer too; here it is one run that ended, with a cause."""
    program = next(it for it in PROGRAMS if it.name == "torchrun")
    run = up(wrap, program, place, options=(*GRACES, "--watch", "reduces.py:2"))
    held = Holdings.of(run)
    ranks = [
        pid
        for pid in held.pids
        if b"reduces.py" in _argv(pid) and pid not in {run.guardian, run.command, run.keeper}
    ]
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGKILL)
    assert run.ended(STOP_S) != 0
    assert f"pid {ranks[0]} died" in run.report["cause"]["what"]
    held.are_gone(1)


def _argv(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
        return file.read()
