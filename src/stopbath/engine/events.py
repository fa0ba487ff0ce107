"""Lifecycle events for whoever listens; one that does not keep up is dropped, nobody waits."""

from __future__ import annotations

import asyncio
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["Events", "Subscription"]

_BUFFER: Final = 256


class Subscription:
    """What one listener has not heard yet; an async iterator that ends with the events."""

    def __init__(self) -> None:
        self._buffer: deque[dict[str, Any]] = deque()
        self._changed = asyncio.Event()
        self._over = False
        self.dropped = False
        """Whether it was ended because nobody listened."""

    def put(self, event: dict[str, Any]) -> bool:
        """Take an event in; False once the buffer is full, which ends the subscription."""
        if len(self._buffer) >= _BUFFER:
            self.dropped = True
            self.end()
            return False
        self._buffer.append(event)
        self._changed.set()
        return True

    def end(self) -> None:
        """Let what is buffered out, then end."""
        self._over = True
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        """Give the events, in order."""
        while True:
            while self._buffer:
                yield self._buffer.popleft()
            if self._over:
                return
            self._changed.clear()
            await self._changed.wait()


class Events:
    """Publishes to all subscriptions. Lives on the engine's loop."""

    def __init__(self) -> None:
        self._subscriptions: set[Subscription] = set()
        self._last_id = 0
        self._over = False

    def publish(self, kind: str, **facts: Any) -> None:
        """Tell everybody; never waits."""
        self._last_id += 1
        at = datetime.now(UTC).isoformat(timespec="milliseconds")  # for people to read
        event = {"id": self._last_id, "event": kind, "at": at, **facts}
        for subscription in list(self._subscriptions):
            if not subscription.put(event):
                self._subscriptions.discard(subscription)

    def subscribe(self) -> Subscription:
        """Hear of everything from now on."""
        subscription = Subscription()
        if self._over:
            subscription.end()
        else:
            self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Forget a listener; harmless when it is forgotten."""
        self._subscriptions.discard(subscription)

    def close(self) -> None:
        """End every subscription, and every later one."""
        self._over = True
        for subscription in self._subscriptions:
            subscription.end()
        self._subscriptions.clear()

    def __len__(self) -> int:
        return len(self._subscriptions)
