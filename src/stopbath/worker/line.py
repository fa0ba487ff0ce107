"""The rank's end of the data channel, and the thread that reads it while the model computes."""

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

    The thread only parses frames. It is a daemon, and nothing depends on its end: a rank may be
    killed at any instant.
    """

    def __init__(self, channel: Channel[ToRank], inbox: Inbox) -> None:
        self._channel = channel
        self._inbox = inbox
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        self._flushed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="stopbath-line", daemon=True)
        self._thread.start()

    def send(self, message: Any) -> None:
        """Queue a message; see `Channel.send` for what can be wrong with it."""
        self._channel.send(message)
        if not self._channel.idle:
            os.eventfd_write(self._wake, 1)

    def send_if_idle(self, message: Any) -> None:
        """Send what may be lost, unless something still waits to be sent."""
        if self._channel.idle:
            try:
                self.send(message)
            except WireError:
                return  # the reader sees the same, and ends the inbox

    def flush(self, by: Deadline) -> bool:
        """Wait until all is with the kernel; whether it was by `by`."""
        with self._flushed:
            return self._flushed.wait_for(
                lambda: self._channel.idle or self._inbox.ended is not None, by.left_s()
            )

    def close(self) -> None:
        """End the thread and close the channel; bounded."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._channel.close()
            os.close(self._wake)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        try:
            while not (self._closing or self._channel.eof):
                wanted = select.POLLIN if self._channel.idle else select.POLLIN | select.POLLOUT
                poll.register(self._channel, wanted)
                for fd, event in poll.poll():
                    self._on_event(fd, event)
            self._inbox.end("the server closed the data channel")
        except (WireError, OSError) as error:
            self._inbox.end(f"the data channel broke: {error}")
        finally:
            with self._flushed:
                self._flushed.notify_all()

    def _on_event(self, fd: int, event: int) -> None:
        if fd == self._wake:
            os.eventfd_read(self._wake)
            return
        if event & select.POLLOUT and self._channel.flush():
            with self._flushed:
                self._flushed.notify_all()
        if event & ~select.POLLOUT:
            for message in self._channel.receive():
                if isinstance(message, Dump):
                    stacks.write()
                    self._channel.send(Dumped())
                else:
                    self._inbox.put(message)
