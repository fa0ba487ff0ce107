"""Two threads stand for two ranks, a barrier for the collective."""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["RANKS", "Table"]

RANKS = 2


class Table:
    """What an all_gather does: everybody puts something down, then everybody sees all of it.

    A rank that comes alone breaks the barrier after `wait_s`: that is the hang.
    """

    def __init__(self, wait_s: float) -> None:
        self.barrier = threading.Barrier(RANKS, timeout=wait_s)
        self.slots: list[Any] = [None] * RANKS

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Put `value` down, wait for the others, give everybody's."""
        self.slots[rank] = value
        self.barrier.wait()
        seen = list(self.slots)
        self.barrier.wait()
        return seen
