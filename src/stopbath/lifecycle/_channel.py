"""Frames over a private Unix socketpair: one JSON object each, file descriptors beside it.

A socketpair per pair of processes: no lock that a killed peer could hold, no name in a
directory. Neither side ever blocks: what cannot be sent now is queued, up to a bound.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, Any

from stopbath.lifecycle._errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MAX_FDS", "MAX_FRAME", "Channel", "Frame"]

Frame = dict[str, Any]

_HEADER = struct.Struct("!IB")  # bytes of payload, number of file descriptors
MAX_FRAME = 8 << 20  # an environment of 2 MiB (ARG_MAX) fits escaped
MAX_QUEUED = 16 << 20
MAX_FDS = 64
MAX_TURN = 1 << 20  # more than the kernel keeps for a peer that is dead
_INT = array.array("i").itemsize
_CMSG = socket.CMSG_SPACE(MAX_FDS * _INT)
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # Linux; elsewhere the exec'd child closes them


class Channel:
    """One end of a socketpair. Owns the socket, and the descriptors queued for sending."""

    __slots__ = ("_fds_in", "_in", "_out", "_queued", "_sock", "eof")

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._in = bytearray()
        self._fds_in: deque[int] = deque()
        self._out: deque[tuple[memoryview, list[int]]] = deque()
        self._queued = 0
        self.eof = False

    def fileno(self) -> int:
        """Give the socket's descriptor, for a selector."""
        return self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether something is queued."""
        return bool(self._out)

    def send(self, message: Frame, fds: Sequence[int] = ()) -> None:
        """Send a frame now or queue it; `fds` are duplicated, the caller keeps its own.

        `BrokenPipeError` when the peer is gone, `ProtocolError` when it has not read for so
        long that the queue is full.
        """
        payload = json.dumps(message, separators=(",", ":")).encode()
        if len(payload) > MAX_FRAME or len(fds) > MAX_FDS:
            raise ProtocolError(f"a frame of {len(payload)} bytes and {len(fds)} fds is too large")
        if self._queued + len(payload) > MAX_QUEUED:
            raise ProtocolError("the other side does not read: its queue is full")
        data = _HEADER.pack(len(payload), len(fds)) + payload
        copies: list[int] = []
        try:
            copies.extend(map(os.dup, fds))
        except OSError:  # EMFILE half way
            _close_all(copies)
            raise
        self._out.append((memoryview(data), copies))
        self._queued += len(data)
        self.flush()

    def flush(self) -> bool:
        """Send what the socket takes now; True when nothing is left. Raises as `send` does."""
        while self._out:
            data, fds = self._out[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self._sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except OSError as error:
                self.eof = True
                self._drop_queue()
                raise BrokenPipeError(error.errno, "the other side is gone") from error
            _close_all(fds)
            self._queued -= sent
            if sent < len(data):
                self._out[0] = (data[sent:], [])
            else:
                self._out.popleft()
        return True

    def keep_up(self, poll: select.poll) -> None:
        """Send what the socket takes now, and have `poll` wake for what is left.

        A peer that is gone is no error here: its end arrives as an event of its own.
        """
        try:
            done = self.flush()
        except BrokenPipeError:
            return
        poll.modify(self.fileno(), select.POLLIN if done else select.POLLIN | select.POLLOUT)

    def receive(self) -> list[tuple[Frame, list[int]]]:
        """Read the whole frames that have arrived; `eof` is set when the peer is gone.

        At most `MAX_TURN` bytes at a time, so that a peer that floods cannot keep the caller:
        what is left makes the socket readable again.

        A reset counts as the end (a killed peer gives ECONNRESET as often as EOF). The caller
        owns the descriptors.
        """
        until = len(self._in) + MAX_TURN
        while not self.eof and len(self._in) < until:
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(65536, _CMSG, _CLOEXEC)
            except BlockingIOError:
                break
            except OSError:
                self.eof = True
                break
            for level, kind, raw in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(raw[: len(raw) - len(raw) % _INT])
                    self._fds_in.extend(fds)
            if flags & socket.MSG_CTRUNC:
                # At EMFILE the kernel delivers the data and drops the descriptors.
                raise ProtocolError("file descriptors were lost: too many open files")
            if not data:
                self.eof = True
            self._in += data
        return self._parse()

    def _parse(self) -> list[tuple[Frame, list[int]]]:
        frames: list[tuple[Frame, list[int]]] = []
        start = 0
        while len(self._in) - start >= _HEADER.size:
            length, count = _HEADER.unpack_from(self._in, start)
            if length > MAX_FRAME or count > MAX_FDS:
                raise ProtocolError(f"not a frame: {length} bytes and {count} fds announced")
            end = start + _HEADER.size + length
            if len(self._in) < end:
                break
            if count > len(self._fds_in):
                raise ProtocolError("a frame came without its file descriptors")
            try:
                message = json.loads(self._in[start + _HEADER.size : end])
            except ValueError as error:
                raise ProtocolError(f"not a frame: {error}") from error
            if not isinstance(message, dict):
                raise ProtocolError("not a frame: no object")
            frames.append((message, [self._fds_in.popleft() for _ in range(count)]))
            start = end
        del self._in[:start]
        return frames

    def _drop_queue(self) -> None:
        for _, fds in self._out:
            _close_all(fds)
        self._out.clear()
        self._queued = 0

    def close(self) -> None:
        """Close the socket and every descriptor on its way in or out."""
        self.eof = True
        self._drop_queue()
        _close_all(self._fds_in)
        self._fds_in.clear()
        self._sock.close()


def _close_all(fds: Sequence[int] | deque[int]) -> None:
    for fd in fds:
        os.close(fd)
