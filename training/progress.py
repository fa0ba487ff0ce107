"""One line per moment of progress, with the time that is left."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

BAR_CELLS: Final = 24


class Progress:
    """Prints ``stage [####....] done/total figures eta`` at most every ``every_s`` seconds.

    A terminal sees one line that is rewritten, a log file sees one line per print.
    """

    def __init__(
        self,
        stage: str,
        total: int,
        *,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        stream: TextIO = sys.stderr,
    ) -> None:
        """Start the count of ``total`` iterations of ``stage`` now."""
        self._stage = stage
        self._total = total
        self._every_s = every_s
        self._clock = clock
        self._stream = stream
        self._started = clock()
        self._printed = self._started
        self._first: int | None = None

    def step(self, done: int, figures: str = "") -> None:
        """Report that ``done`` iterations are complete; print when it is time."""
        now = self._clock()
        if self._first is None:
            # A resumed stage starts above zero: only what this process did tells its speed.
            self._first = done - 1
        last = done >= self._total
        if not last and now - self._printed < self._every_s:
            return
        self._printed = now
        spent_s = now - self._started
        left_s = spent_s / (done - self._first) * (self._total - done)
        filled = BAR_CELLS * done // self._total
        bar = "#" * filled + "." * (BAR_CELLS - filled)
        time_text = f"took {_minutes(spent_s)}" if last else f"eta {_minutes(left_s)}"
        line = f"{self._stage:<12} [{bar}] {done}/{self._total} {figures} {time_text}"
        on_terminal = self._stream.isatty()
        end = "\r" if on_terminal and not last else "\n"
        self._stream.write(f"\x1b[2K{line}{end}" if on_terminal else f"{line}{end}")
        self._stream.flush()


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
