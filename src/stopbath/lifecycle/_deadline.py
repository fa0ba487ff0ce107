"""Deadlines: absolute, monotonic, passed on instead of timeouts."""

from __future__ import annotations

import math
import time

__all__ = ["Deadline"]


class Deadline:
    """A moment on the monotonic clock by which something must be over.

    Passing one deadline through several waits gives them one budget. The clock is
    `time.monotonic` (CLOCK_MONOTONIC on Linux): it neither jumps with the wall clock nor
    counts the time the machine was suspended.
    """

    __slots__ = ("at_s",)

    def __init__(self, at_s: float) -> None:
        if math.isnan(at_s):
            raise ValueError("a deadline cannot be NaN: give seconds as a number")
        self.at_s = at_s

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Give the moment `seconds` from now; a negative number acts as now."""
        return cls(time.monotonic() + max(seconds, 0.0))  # in this order NaN is seen

    @classmethod
    def never(cls) -> Deadline:
        """Give the moment that never comes, for waits that something else bounds."""
        return cls(math.inf)

    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at_s - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether the moment has come."""
        return time.monotonic() >= self.at_s

    def sooner(self, other: Deadline) -> Deadline:
        """Give the earlier of two deadlines."""
        return self if self.at_s <= other.at_s else other

    def __repr__(self) -> str:
        return f"<Deadline in {self.at_s - time.monotonic():.3f} s>"
