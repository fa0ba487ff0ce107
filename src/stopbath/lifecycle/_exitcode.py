"""What the exit code of a run says: one meaning each, decided purely.

0 a clean stop that was asked for · 1 unexpected error · 2 usage · 3 start-up failed · 4 the engine
was dead when it ended · 5 survivors remain · 128+n forced by a repeated signal n.
Precedence: 5 > 4 > 3 > 1 > 128+n > 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from stopbath.lifecycle._errors import Exit

__all__ = [
    "CLEAN",
    "ENGINE_DEAD",
    "START_FAILED",
    "SURVIVORS",
    "UNEXPECTED",
    "USAGE",
    "Ending",
    "exit_code",
]

CLEAN, UNEXPECTED, USAGE, START_FAILED, ENGINE_DEAD, SURVIVORS = range(6)
_OWN = (UNEXPECTED, USAGE, START_FAILED, ENGINE_DEAD)


class Ending(NamedTuple):
    """How the server process ended, and what was asked of it."""

    exit: Exit
    asked: bool
    was_ready: bool
    killed_by_us: bool
    survivors: bool
    signals: tuple[int, ...]


def exit_code(ending: Ending) -> int:
    """Give the exit code of `serve` for an ending."""
    if ending.survivors:
        return SURVIVORS
    forced = 128 + ending.signals[-1] if len(ending.signals) > 1 else CLEAN
    if ending.exit.code is not None:
        if ending.exit.code in _OWN:
            return ending.exit.code
        return forced if ending.exit.code == CLEAN else UNEXPECTED
    if ending.asked:
        # Ended by a step of ours: the second or third signal asked for that; a first one did
        # not, and a server that had to be killed for it was hung.
        if ending.killed_by_us and forced == CLEAN:
            return UNEXPECTED
        return forced
    return ENGINE_DEAD if ending.was_ready else START_FAILED
