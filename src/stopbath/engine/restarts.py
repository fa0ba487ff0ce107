"""How often a replica may be restarted, and when: pure policy, no I/O and no clock of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["RestartPolicy"]

_FIRST_S: Final = 0.5
_LONGEST_S: Final = 30.0
_DOUBLINGS: Final = 10


@dataclass(slots=True)
class RestartPolicy:
    """The restarts of one replica: at most `max_restarts` in a row, further and further apart.

    A row ends when the replica has served for `window_s` seconds without a break. Erlang counts
    restarts per period instead; a model that takes a minute to load and then crashes would never
    exceed such a count, so here the time that a replica starts or waits does not count.
    """

    max_restarts: int
    window_s: float
    in_a_row: int = 0
    _ready_s: float | None = None

    def ready(self, now: float) -> None:
        """Note that the replica serves."""
        self._ready_s = now

    def died(self, now: float) -> float | None:
        """Note a death, or a start that failed: seconds until the next try, None to give up."""
        if self._ready_s is not None and now - self._ready_s >= self.window_s:
            self.in_a_row = 0
        self._ready_s = None
        if self.in_a_row >= self.max_restarts:
            return None
        delay_s = min(_FIRST_S * (1 << min(self.in_a_row, _DOUBLINGS)), _LONGEST_S)
        self.in_a_row += 1
        return delay_s
