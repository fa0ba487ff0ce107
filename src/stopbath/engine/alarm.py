"""One timer, for the earliest of many deadlines."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Alarm"]


class Alarm:
    """Calls `ring` on the loop once its moment has passed."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at_s: float | None) -> None:
        """Ring at this monotonic second instead of the one before; None: not at all."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at_s is not None:
            left_s = max(0.0, at_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(left_s, self._ring)
