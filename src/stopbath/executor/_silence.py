"""For how long each rank that owes an answer has said nothing; no I/O, no clock of its own."""

from __future__ import annotations

import math
import threading
from typing import Final

__all__ = ["Silence"]

_TICKS: Final = 8


class Silence:
    """Silence counted in ticks of an eighth of the budget.

    A tick counts once, however long it took. So what stopped this process as well (SIGSTOP, a
    suspended machine, a paused container) is no silence of a rank's: it costs one tick, and what
    the rank said meanwhile is read before the tick is counted. Nothing ticks while no rank owes
    anything. A rank is over its budget after more than eight ticks: between one budget and nine
    eighths of it. Safe from any thread.
    """

    def __init__(self, ranks: int, budget_s: float) -> None:
        self._tick_s = budget_s / _TICKS
        self._lock = threading.Lock()
        self._owed: list[set[int]] = [set() for _ in range(ranks)]
        self._silent = [0] * ranks
        self._next_s = math.inf

    def owe(self, call_id: int, now: float) -> None:
        """Note that every rank is being sent a call."""
        with self._lock:
            if not any(self._owed):
                self._next_s = now + self._tick_s
            for rank, owed in enumerate(self._owed):
                if not owed:
                    self._silent[rank] = 0
                owed.add(call_id)

    def heard(self, rank: int, answered: int | None = None) -> None:
        """Note that a rank said something, and which call it answered if it did."""
        with self._lock:
            self._silent[rank] = 0
            if answered is not None:
                self._owed[rank].discard(answered)

    @property
    def due_s(self) -> float:
        """Give the monotonic second of the next tick; infinity while nobody owes anything."""
        with self._lock:
            return self._next_s if any(self._owed) else math.inf

    def tick(self, now: float) -> list[int]:
        """Count a tick if it is due; give the ranks that are over their budget."""
        with self._lock:
            if now < self._next_s or not any(self._owed):
                return []
            self._next_s = now + self._tick_s
            late = []
            for rank, owed in enumerate(self._owed):
                self._silent[rank] += bool(owed)
                if owed and self._silent[rank] > _TICKS:
                    late.append(rank)
            return late
