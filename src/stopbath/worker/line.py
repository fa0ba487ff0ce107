"""The rank's end of the data channel: read by the loop while it waits, by a thread meanwhile."""

from __future__ import annotations

import os
import select
import threading
from typing import TYPE_CHECKING, Any, Final

from stopbath.messages import Dump, Dumped
from stopbath.wire import Channel, WireError
from stopbath.worker import stacks

if TYPE_CHECKING:
    from stopbath.lifecycle import Deadline
    from stopbath.messages import ToRank
    from stopbath.worker.inbox import Inbox

__all__ = ["Line"]

_JOIN_S: Final = 1.0


class Line:
    """Reads calls and cancels into the inbox, and sends on what the kernel did not take at once.

    A loop that waits for a call reads the channel itself: handing each call over from one thread
    to another would cost more than the call's way here. While the loop computes, the channel is
    in the epoll set of a thread, which costs two system calls and wakes nobody unless something
    comes. The thread only parses frames. It is a daemon, and nothing depends on its end: a rank
    may be killed at any instant.
    """

    def __init__(self, channel: Channel[ToRank], inbox: Inbox) -> None:
        self._channel = channel
        self._inbox = inbox
        self._lock = threading.Lock()  # whoever receives, and who that is
        self._loop_reads = False
        self._wake_thread, self._wake_loop = _event(), _event()
        self._watched = select.epoll()
        self._watched.register(self._wake_thread, select.EPOLLIN)
        self._watched.register(channel, select.EPOLLIN)
        self._waiting = select.poll()
        self._waiting.register(self._wake_loop, select.POLLIN)
        self._waiting.register(channel, select.POLLIN)
        self._closing = False
        self._flushed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="stopbath-line", daemon=True)
        self._thread.start()

    # -- for the loop ----------------------------------------------------------------------

    def leave(self) -> None:
        """Have the thread read from now on: the loop is going to compute. Idempotent."""
        if self._loop_reads:
            with self._lock:
                self._loop_reads = False
                self._watched.register(self._channel, self._wanted)

    def come_back(self) -> None:
        """Have the loop read from now on, in `wait`. Idempotent.

        Best before an answer is sent: what follows it then finds the loop and not the thread.
        """
        if not self._loop_reads:
            with self._lock:
                self._watched.unregister(self._channel)
                self._loop_reads = True

    def wait(self, *, news: bool = False) -> None:
        """Wait until the inbox has work for the loop, reading the channel meanwhile.

        Idle ranks sleep here, without a time limit on purpose (no cost when idle): a stop, the
        channel's end and the server's death all end the wait, the last by SIGKILL.
        """
        self.come_back()
        # What is put after this look at the inbox is followed by a nudge.
        while not self._inbox.has_work(news=news):
            self._wait_once()

    def nudge(self) -> None:
        """Have a waiting loop look at the inbox; from any thread, after something was put."""
        if self._loop_reads:
            os.eventfd_write(self._wake_loop, 1)

    def send(self, message: Any) -> None:
        """Queue a message; see `Channel.send` for what can be wrong with it."""
        self._channel.send(message)
        if not (self._channel.idle or self._loop_reads):
            os.eventfd_write(self._wake_thread, 1)

    def send_if_idle(self, message: Any) -> None:
        """Send what may be lost, unless something still waits to be sent."""
        if self._channel.idle:
            try:
                self.send(message)
            except WireError:
                return  # the reader sees the same, and ends the inbox

    def flush(self, by: Deadline) -> bool:
        """Wait until all is with the kernel; whether it was by `by`."""
        self.leave()
        with self._flushed:
            return self._flushed.wait_for(
                lambda: self._channel.idle or self._inbox.ended is not None, by.left_s()
            )

    def close(self) -> None:
        """End the thread and close the channel; bounded."""
        self._closing = True
        os.eventfd_write(self._wake_thread, 1)
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._channel.close()
            self._watched.close()
            os.close(self._wake_thread)
            os.close(self._wake_loop)

    # -- reading ---------------------------------------------------------------------------

    @property
    def _wanted(self) -> int:
        """EPOLL and POLL agree on these two."""
        return select.EPOLLIN if self._channel.idle else select.EPOLLIN | select.EPOLLOUT

    def _wait_once(self) -> None:
        self._waiting.modify(self._channel, self._wanted)
        for fd, event in self._waiting.poll():
            if fd == self._wake_loop:
                os.eventfd_read(self._wake_loop)
            else:
                self._serve(event)

    def _run(self) -> None:
        while not (self._closing or self._inbox.ended):
            with self._lock:
                if not self._loop_reads:
                    self._watched.modify(self._channel, self._wanted)
            for fd, event in self._watched.poll():
                if fd == self._wake_thread:
                    os.eventfd_read(self._wake_thread)
                else:
                    self._serve(event)
                    self.nudge()  # the loop may have begun to wait since
        with self._flushed:
            self._flushed.notify_all()

    def _serve(self, event: int) -> None:
        """Send and receive what can be; the end of the channel is the inbox's."""
        try:
            if event & select.EPOLLOUT and self._channel.flush():
                with self._flushed:
                    self._flushed.notify_all()
            if event & ~select.EPOLLOUT:
                with self._lock:
                    for message in self._channel.receive():
                        self._take(message)
            if self._channel.eof:
                self._inbox.end("the server closed the data channel")
        except (WireError, OSError) as error:
            self._inbox.end(f"the data channel broke: {error}")

    def _take(self, message: ToRank) -> None:
        if isinstance(message, Dump):
            stacks.write()
            self._channel.send(Dumped())
        else:
            self._inbox.put(message)


def _event() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
