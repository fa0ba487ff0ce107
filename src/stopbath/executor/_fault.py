"""The first cause of a replica's end, latched once, and who wants to hear of it."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopbath.errors import WorkerLost
    from stopbath.lifecycle import Cause

__all__ = ["FaultLatch"]

_log = logging.getLogger("stopbath.executor")


class FaultLatch:
    """Safe from any thread; holds no lock while it calls out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Cause], None]] = []
        self.cause: Cause | None = None
        self.error: WorkerLost | None = None
        """What requests end with; set together with the cause."""

    def latch(self, cause: Cause, error: WorkerLost) -> bool:
        """Take the first cause; whether this was it. `tell` comes after what follows from it."""
        with self._lock:
            if self.cause is not None:
                return False
            self.error = error
            self.cause = cause
            return True

    def tell(self) -> None:
        """Call whoever asked to hear of the cause."""
        with self._lock:
            cause = self.cause
            callbacks, self._callbacks = self._callbacks, []
        if cause is None:
            return
        for callback in callbacks:
            try:
                callback(cause)
            except Exception:  # noqa: BLE001  (the others still have to hear of it)
                _log.exception("an on_failure callback raised")

    def on_failure(self, callback: Callable[[Cause], None]) -> None:
        """Have `callback` called once with the cause; a late one is told at once."""
        with self._lock:
            cause = self.cause
            if cause is None:
                self._callbacks.append(callback)
        if cause is not None:
            callback(cause)
