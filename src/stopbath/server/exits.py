"""What the server's end means, as an exit code: the only place that knows the numbers."""

from __future__ import annotations

import enum

__all__ = ["Ending", "exit_code"]


class Ending(enum.Enum):
    """How the server came to its end; several can hold at once."""

    ASKED = "asked to stop"
    ERROR = "unexpected error"
    USAGE = "asked for something that cannot be"
    START_FAILED = "start-up failed"
    ENGINE_DEAD = "a replica was lost and not restored"
    SURVIVORS = "something is still alive"


# Whichever comes first here wins; a usage error happens before anything else can.
_CODES: tuple[tuple[Ending, int], ...] = (
    (Ending.USAGE, 2),
    (Ending.SURVIVORS, 5),
    (Ending.ENGINE_DEAD, 4),
    (Ending.START_FAILED, 3),
    (Ending.ERROR, 1),
    (Ending.ASKED, 0),
)


def exit_code(endings: set[Ending]) -> int:
    """Give the one code; an end that nobody accounts for is an unexpected error."""
    for ending, code in _CODES:
        if ending in endings:
            return code
    return 1
