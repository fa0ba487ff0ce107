"""A command's stderr on its way to ours, byte for byte, while the last lines are kept.

The command must never wait for whoever reads our stderr, and the end of what it said must never
be lost. So what our stderr does not take at once is kept here, up to a bound; beyond it the
oldest is dropped, and a line says how much. What is left at the end gets a bounded wait.
"""

from __future__ import annotations

import os
import select
import stat
from collections import deque
from typing import TYPE_CHECKING

from stopbath.lifecycle._words import Words

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopbath.lifecycle._deadline import Deadline

__all__ = ["Tee"]

_MOST = 2 << 20  # bytes kept for a reader that is slow
_SAFE = 4096  # what a pipe that polls writable takes without blocking (pipe(7))


class Tee(Words):
    """The words of a command, handed on as they came."""

    __slots__ = ("_dropped", "_held", "_out", "_own", "_size", "on_blocked")

    def __init__(self, out: int = 2) -> None:
        super().__init__(b"")
        self._held: deque[bytes] = deque()
        self._size = self._dropped = 0
        self._out, self._own = _unblocked(out)
        self.on_blocked: Callable[[], None] = lambda: None

    @property
    def out(self) -> int:
        """Where it goes to: the descriptor to wait for when something is held."""
        return self._out

    @property
    def holds(self) -> bool:
        """Whether something could not be handed on yet."""
        return bool(self._held)

    def read(self) -> bytes:
        """Read what the pipe holds, and hand it on; nothing is left for the caller to forward."""
        data = self._pull()
        self._keep(data)
        if data:
            self._held.append(data)
            self._size += len(data)
            self.pass_on()
            while self._size > _MOST and len(self._held) > 1:
                lost = len(self._held.popleft())
                self._size -= lost
                self._dropped += lost
            if self._held:
                self.on_blocked()
        return b""

    def pass_on(self) -> None:
        """Write what our stderr takes now."""
        poll = select.poll()
        poll.register(self._out, select.POLLOUT)
        while self._held and any(mask & select.POLLOUT for _, mask in poll.poll(0)):
            if self._dropped:
                line = f"\nstopbath: {self._dropped} bytes of stderr dropped: nobody read them\n"
                self._held.appendleft(line.encode())
                self._size += len(line)
                self._dropped = 0
            first = self._held[0]
            try:
                done = os.write(self._out, first[:_SAFE])
            except BlockingIOError:
                return
            except OSError:  # the reader is gone; the lines are kept for the report
                self._held.clear()
                self._size = 0
                return
            self._size -= done
            if done < len(first):
                self._held[0] = first[done:]
            else:
                self._held.popleft()

    def finish(self, by: Deadline) -> None:
        """Hand on what is still held, waiting for the reader until `by`."""
        poll = select.poll()
        poll.register(self._out, select.POLLOUT)
        while self._held and poll.poll(by.left_s() * 1000):
            self.pass_on()
        if self._own:
            os.close(self._out)
            self._own = False
            self._out = 2


def _unblocked(fd: int) -> tuple[int, bool]:
    """Give a descriptor that never blocks, and whether it is our own.

    A terminal or a pipe is opened anew: to set O_NONBLOCK on what is shared with the shell and
    the command would change it for them too. A file never blocks, and has one position.
    """
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISFIFO(mode) or os.isatty(fd):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            return os.open(f"/proc/self/fd/{fd}", flags), True
    except OSError:
        return fd, False  # written to in pieces that a pipe takes without blocking
    return fd, False
