"""The last words of a worker: its stderr, read without ever waiting, kept and forwarded."""

from __future__ import annotations

import fcntl
import os
import select
from collections import deque

__all__ = ["Words", "forward"]

_PIPE_BYTES = 1 << 20  # a 64 KiB pipe freezes a chatty worker while we are stopped
_KEPT_LINES, _LINE_BYTES = 64, 2000
_TURN_BYTES = 1 << 20  # read at a time, so that a worker that floods cannot starve the others


class Words:
    """The read end of one worker's stderr pipe. Owns it."""

    __slots__ = ("_lines", "_partial", "_prefix", "fd")

    def __init__(self, prefix: bytes) -> None:
        self.fd = -1
        self._prefix = prefix
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._partial = b""

    def open(self) -> int:
        """Make the pipe; gives the write end, which the caller closes once it is handed on."""
        self.fd, write_end = os.pipe()
        os.set_blocking(self.fd, False)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:
            return write_end  # over the user's pipe limit: the default works, with less slack
        return write_end

    def read(self) -> bytes:
        """Read what the pipe holds, never to EOF: strays hold it open.

        Gives whole lines to be forwarded; closes the pipe when every writer is gone.
        """
        return b"".join(self._prefix + line + b"\n" for line in self._keep(self._pull()))

    def _pull(self) -> bytes:
        data = bytearray()
        while self.fd >= 0 and len(data) < _TURN_BYTES:
            try:
                chunk = os.read(self.fd, 65536)
            except BlockingIOError:
                break
            if not chunk:
                self.close()
            data += chunk
        return bytes(data)

    def _keep(self, data: bytes) -> list[bytes]:
        """Keep the last lines for the report; gives every line that is whole."""
        whole, newline, rest = (self._partial + data).rpartition(b"\n")
        self._partial = rest[-_LINE_BYTES:]
        lines = whole.split(b"\n") if newline else []
        if self.fd < 0 and self._partial:
            lines.append(self._partial)
            self._partial = b""
        self._lines.extend(
            line[:_LINE_BYTES].decode("utf-8", "replace") for line in lines[-_KEPT_LINES:]
        )
        return lines

    def last(self) -> tuple[str, ...]:
        """Give the last lines, an unfinished one included."""
        unfinished = [self._partial.decode("utf-8", "replace")] if self._partial else []
        return (*self._lines, *unfinished)[-_KEPT_LINES:]

    def close(self) -> None:
        """Close the pipe; the supervisor takes it out of its selector."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def forward(data: bytes, fd: int = 2) -> None:
    """Write to our stderr what it takes without blocking; the rest is dropped.

    A terminal stopped by Ctrl-S or a full pipe must not hold up the supervisor. A pipe that
    polls writable takes PIPE_BUF (4096) bytes (pipe(7)).
    """
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    view = memoryview(data)
    try:
        while view and any(mask & select.POLLOUT for _, mask in poll.poll(0)):
            view = view[os.write(fd, view[:4096]) :]
    except OSError:
        return  # stderr is gone; the lines are kept for the report
