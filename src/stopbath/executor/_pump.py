"""The one thread of an executor: reads what the ranks say, sends on what waits, ends late calls."""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from stopbath.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from stopbath.messages import FromRank
    from stopbath.wire import Channel

__all__ = ["Pump"]

_log = logging.getLogger("stopbath.executor")
_LONGEST_WAIT_S: Final = 3600.0  # what epoll takes; it waits again


class Pump:
    """An epoll set over the data channels, wake-up descriptors and the next deadline; no polling.

    A thread that makes a call and waits for it reads the channels itself (`borrow`), which
    spares waking the pump's thread and then the caller: that costs more than the whole call.
    Deadlines stay with the pump's thread. The channels are in a set of their own, so that taking
    them away from the thread and giving them back is one system call each.

    The channels belong to the pump: its thread closes them when it ends, so that no descriptor
    is ever closed under somebody who waits for it.

    Args:
        channels: By rank.
        on_message: Called with rank and message, on whichever thread reads.
        on_lost: Called once per rank whose channel ended or broke, with the reason.
        next_due: Gives the monotonic second at which `on_due` has something to do.
        on_due: Called on the pump's thread when that moment has passed.
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
        self._wake, self._wake_reader = _event(), _event()
        self._readable = select.epoll()  # what there is to read, for whoever reads
        self._readable.register(self._wake_reader, select.EPOLLIN)
        self._ranks = {channel.fileno(): rank for rank, channel in enumerate(self._channels)}
        self._interest = dict.fromkeys(self._ranks, select.EPOLLIN)
        for fd, events in self._interest.items():
            self._readable.register(fd, events)
        self._events = select.epoll()  # what the pump's thread waits for
        self._events.register(self._wake, select.EPOLLIN)
        self._events.register(self._readable, select.EPOLLIN)
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # held by whoever reads the channels
        self._reader: int | None = None  # the thread that attends, if one does
        self._ending = False
        self._over = False
        self._sleeps_until = math.inf
        self._thread = threading.Thread(target=self._run, name=f"stopbath-pump-{name}", daemon=True)
        self._thread.start()

    # -- from any thread -------------------------------------------------------------------

    def look_again(self, due: float = -math.inf) -> None:
        """Have somebody look at queues and deadlines, if nobody would by `due` anyway."""
        if due >= self._sleeps_until:
            return
        self._poke()

    def borrow(self) -> bool:
        """Have this thread read the channels until it gives them back; False where it cannot.

        That is where somebody else reads already, and on the main thread: a Ctrl-C there could
        come between a message's arrival and its being noted.
        """
        if threading.current_thread() is threading.main_thread():
            return False
        if not self._reading.acquire(blocking=False):
            return False
        if self._ending:  # or over: the descriptors are closed then
            self._reading.release()
            return False
        self._events.unregister(self._readable)
        self._reader = threading.get_ident()
        return True

    def read_until(self, future: Future[Any]) -> None:
        """Read until a future has ended; for the thread that has borrowed the channels."""
        future.add_done_callback(self._tell_reader)
        while not (future.done() or self._ending):
            self._read(None)

    def give_back(self) -> None:
        """Have the pump's own thread read again."""
        self._reader = None
        self._events.register(self._readable, select.EPOLLIN)
        self._reading.release()
        if not all(channel.idle for channel in self._channels):
            self._poke()  # what was queued just now found a reader that had looked already

    def end(self, wait_s: float) -> bool:
        """Have the thread close the channels and end; whether it has within `wait_s` seconds.

        From a thread that reads (a callback that shuts the executor down) it does not wait.
        """
        self._ending = True
        self._poke()
        if threading.get_ident() not in {self._thread.ident, self._reader}:
            self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _poke(self) -> None:
        with self._lock:  # the number may be somebody else's after the end
            if not self._over:
                os.eventfd_write(self._wake, 1)
                if self._reader is not None:
                    os.eventfd_write(self._wake_reader, 1)

    def _tell_reader(self, _future: Future[Any]) -> None:
        """Say that a future ended to the thread that waits for it, unless it ended it itself."""
        if self._reader != threading.get_ident():
            with self._lock:
                if self._reader is not None:
                    os.eventfd_write(self._wake_reader, 1)

    # -- reading, by one thread at a time --------------------------------------------------

    def _read(self, wait_s: float | None) -> None:
        for fd, channel in zip(self._interest, self._channels, strict=True):
            wanted = select.EPOLLIN if channel.idle else select.EPOLLIN | select.EPOLLOUT
            if self._interest[fd] != wanted and fd in self._ranks:
                self._interest[fd] = wanted
                self._readable.modify(fd, wanted)
        for fd, event in self._readable.poll(wait_s):
            if fd == self._wake_reader:
                os.eventfd_read(fd)
            else:
                self._serve(fd, event)

    def _serve(self, fd: int, event: int) -> None:
        rank = self._ranks[fd]
        channel = self._channels[rank]
        why = ""
        try:
            if event & select.EPOLLOUT:
                channel.flush()
            messages = channel.receive()
        except WireError as error:
            messages, why = [], f"broke its data channel: {error}"
        for message in messages:
            self._guarded(self._on_message, rank, message)
        if channel.eof or why:
            self._readable.unregister(fd)
            del self._ranks[fd]
            channel.close()
            self._guarded(self._on_lost, rank, why or "closed its data channel")

    # -- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ending:
                self._turn()
        finally:
            with self._reading:  # whoever attends leaves, because this is the end
                with self._lock:
                    self._over = True
                for channel in self._channels:
                    channel.close()
                self._readable.close()
                self._events.close()
                os.close(self._wake)
                os.close(self._wake_reader)

    def _turn(self) -> None:
        # A moment that is set stays, although nothing may be due any more by then: otherwise the
        # thread would have to be woken for each of many short calls, one after another.
        before = self._sleeps_until
        # In this order: whoever adds a deadline after it was read sees an old, later
        # `_sleeps_until` and pokes.
        self._sleeps_until = math.inf
        due = self._next_due()
        if time.monotonic() < before:
            due = min(due, before)
        self._sleeps_until = due
        wait_s = min(max(0.0, due - time.monotonic()), _LONGEST_WAIT_S)
        for fd, _ in self._events.poll(wait_s):
            if fd == self._wake:
                os.eventfd_read(fd)
        if self._reading.acquire(blocking=False):
            try:
                self._read(0)
            finally:
                self._reading.release()
        if time.monotonic() >= due:
            self._guarded(self._on_due)

    def _guarded(self, callback: Callable[..., None], *args: object) -> None:
        """Nothing that is called from here may end the thread that ends everybody's futures."""
        try:
            callback(*args)
        except BaseException:  # noqa: BLE001
            _log.warning("the pump's callback raised", exc_info=True)


def _event() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
