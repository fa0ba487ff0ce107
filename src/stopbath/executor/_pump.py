"""The one thread of an executor: reads what the ranks say, sends on what waits, ends late calls."""

from __future__ import annotations

import logging
import math
import os
import selectors
import threading
import time
from typing import TYPE_CHECKING, Final

from stopbath.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stopbath.messages import FromRank
    from stopbath.wire import Channel

__all__ = ["Pump"]

_log = logging.getLogger("stopbath.executor")
_LONGEST_WAIT_S: Final = 3600.0  # what the selector takes; it waits again


class Pump:
    """A selector over the data channels, a wake-up descriptor and the next deadline; no polling.

    The channels belong to the pump: its thread closes them when it ends, so that no descriptor
    is ever closed under the selector.

    Args:
        channels: By rank.
        on_message: Called on the pump's thread with rank and message.
        on_lost: Called once per rank whose channel ended or broke, with the reason.
        next_due: Gives the monotonic second at which `on_due` has something to do.
        on_due: Called when that moment has passed.
    """

    def __init__(
        self,
        name: str,
        channels: Sequence[Channel[FromRank]],
        *,
        on_message: Callable[[int, FromRank], None],
        on_lost: Callable[[int, str], None],
        next_due: Callable[[], float],
        on_due: Callable[[], None],
    ) -> None:
        self._channels = list(channels)
        self._on_message, self._on_lost = on_message, on_lost
        self._next_due, self._on_due = next_due, on_due
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._ending = False
        self._over = False
        self._sleeps_until = math.inf
        self._thread = threading.Thread(target=self._run, name=f"stopbath-pump-{name}", daemon=True)
        self._thread.start()

    def look_again(self, due: float = -math.inf) -> None:
        """Have the thread look at queues and deadlines, if it would not by `due` anyway."""
        if due >= self._sleeps_until:
            return
        self._poke()

    def end(self, wait_s: float) -> bool:
        """Have the thread close the channels and end; whether it has within `wait_s` seconds.

        From the pump's own thread (a callback that shuts the executor down) it does not wait.
        """
        self._ending = True
        self._poke()
        if threading.current_thread() is not self._thread:
            self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _poke(self) -> None:
        with self._lock:  # the number may be somebody else's after the end
            if not self._over:
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake, selectors.EVENT_READ, None)
                for rank, channel in enumerate(self._channels):
                    selector.register(channel, selectors.EVENT_READ, rank)
                while not self._ending:
                    self._turn(selector)
        finally:
            with self._lock:
                self._over = True
                os.close(self._wake)
            for channel in self._channels:
                channel.close()

    def _turn(self, selector: selectors.BaseSelector) -> None:
        self._watch_writable(selector)
        # In this order: whoever adds a deadline after it was read sees an old, later
        # `_sleeps_until` and pokes.
        self._sleeps_until = math.inf
        due = self._next_due()
        self._sleeps_until = due
        wait_s = min(max(0.0, due - time.monotonic()), _LONGEST_WAIT_S)
        for key, event in selector.select(wait_s):
            if key.data is None:
                os.eventfd_read(self._wake)
            else:
                self._serve(selector, key.data, event)
        if time.monotonic() >= due:
            self._guarded(self._on_due)

    def _watch_writable(self, selector: selectors.BaseSelector) -> None:
        for key in list(selector.get_map().values()):
            if key.data is None:
                continue
            idle = self._channels[key.data].idle
            wanted = selectors.EVENT_READ if idle else selectors.EVENT_READ | selectors.EVENT_WRITE
            if key.events != wanted:
                selector.modify(key.fileobj, wanted, key.data)

    def _serve(self, selector: selectors.BaseSelector, rank: int, event: int) -> None:
        channel = self._channels[rank]
        why = "closed its data channel"
        try:
            if event & selectors.EVENT_WRITE:
                channel.flush()
            messages = channel.receive()
        except WireError as error:
            messages, why = [], f"broke its data channel: {error}"
        for message in messages:
            self._guarded(self._on_message, rank, message)
        if channel.eof or why != "closed its data channel":
            selector.unregister(channel)
            channel.close()
            self._guarded(self._on_lost, rank, why)

    def _guarded(self, callback: Callable[..., None], *args: object) -> None:
        """Nothing that is called from here may end the thread that ends everybody's futures."""
        try:
            callback(*args)
        except BaseException:  # noqa: BLE001
            _log.warning("the pump's callback raised", exc_info=True)
