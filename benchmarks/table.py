"""Rows of a bench: what was measured, its median and its worst, and the goal beside it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

__all__ = ["Bench", "Row", "row"]


class Row(NamedTuple):
    """One measured thing; the values are in `unit`."""

    what: str
    median: float
    worst: float
    unit: str
    goal: str

    def line(self) -> str:
        """Give the row for a terminal of 80 columns."""
        return (
            f"{self.what:<44.44} {self.median:>9.4g} {self.worst:>9.4g} {self.unit:<3}"
            f"{self.goal:>10}"
        )


Bench = Callable[[], Iterator[Row]]


def row(what: str, values: list[float], unit: str, goal: str) -> Row:
    """Summarize values: the median, and the 99th percentile (the largest, below 100 values)."""
    ordered = sorted(values)
    worst = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return Row(f"{what} (n={len(values)})", statistics.median(values), worst, unit, goal)
