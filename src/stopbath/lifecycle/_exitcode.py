"""What the exit code of a run says: one meaning each, decided purely.

0 a clean stop that was asked for · 1 unexpected error · 2 usage · 3 start-up failed · 4 the engine
was dead when it ended · 5 survivors remain · 128+n forced by a repeated signal n.
Precedence: 5 > 4 > 3 > 1 > 128+n > 0.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from stopbath.lifecycle._errors import Exit

__all__ = [
    "CLEAN",
    "ENGINE_DEAD",
    "NOT_EXECUTABLE",
    "NOT_FOUND",
    "RUN_FAILED",
    "START_FAILED",
    "SURVIVORS",
    "UNEXPECTED",
    "USAGE",
    "Ending",
    "run_exit_code",
    "serve_exit_code",
]

CLEAN, UNEXPECTED, USAGE, START_FAILED, ENGINE_DEAD, SURVIVORS = range(6)
RUN_FAILED, NOT_EXECUTABLE, NOT_FOUND = 125, 126, 127
_OWN = (UNEXPECTED, USAGE, START_FAILED, ENGINE_DEAD)


class Ending(NamedTuple):
    """How the server process ended, and what was asked of it."""

    exit: Exit
    asked: bool
    was_ready: bool
    killed_by_us: bool
    survivors: bool
    signals: tuple[int, ...]
    spawn_errno: int = 0
    lost: bool = False  # a signal ended it that no step of the stop had sent; `run`: see --watch
    keeper_lost: bool = False  # the keeper ended before the stop was over


def run_exit_code(ending: Ending) -> int:
    """Give the exit code of `run`: the command's own, or a shell's for one that cannot be run.

    128+n when signal n ended it; 125 when survivors remain, when its end is not known, when it
    was killed because the keeper was lost, and when it says 0 although a process that it was to
    keep alive was lost.
    """
    if ending.survivors or (ending.keeper_lost and ending.killed_by_us):
        return RUN_FAILED
    if ending.spawn_errno:
        return NOT_FOUND if ending.spawn_errno == errno.ENOENT else NOT_EXECUTABLE
    if ending.exit.signal is not None:
        return 128 + ending.exit.signal
    if ending.exit.code is None or (ending.exit.code == CLEAN and ending.lost):
        return RUN_FAILED
    return ending.exit.code


def serve_exit_code(ending: Ending) -> int:
    """Give the exit code of `serve` for an ending."""
    if ending.survivors:
        return SURVIVORS
    if ending.exit.code in _OWN:
        return ending.exit.code
    if ending.exit.code not in {None, CLEAN}:
        return UNEXPECTED
    # It ended, however politely, and nobody had asked it to; or a stranger's signal ended it.
    if not ending.asked or ending.lost:
        return ENGINE_DEAD if ending.was_ready else START_FAILED
    if len(ending.signals) > 1:
        return 128 + ending.signals[-1]
    # One signal asks for an orderly stop; a server that had to be killed for it was hung.
    return UNEXPECTED if ending.killed_by_us else CLEAN
