"""One end of a data channel: frames in, frames out, never blocking."""

from __future__ import annotations

import array
import errno
import socket
import struct
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from stopbath.wire._frames import MAX_FDS, Codec, FrameTooLarge, WireError, close_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopbath.wire._blobs import Blob

__all__ = ["MAX_FRAME", "Channel", "ChannelClosed", "ChannelFull", "Frame"]

MAX_FRAME: Final = 16 << 20
"""Bytes of one frame's payload; whatever is bigger belongs in blobs."""

MAX_QUEUED_FRAMES: Final = 1024
MAX_QUEUED_BYTES: Final = 64 << 20

_HEADER: Final = struct.Struct("<II")
_READ_BYTES: Final = 256 << 10
_READS_PER_CALL: Final = 16  # then the other channels of the same thread get their turn
# As plain numbers: an IntFlag's `|` takes longer than some system calls.
_SEND_FLAGS: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_READ_FLAGS: Final = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
_TRUNCATED: Final = int(socket.MSG_CTRUNC)
_ANCILLARY: Final = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
# How the death of the peer shows: ECONNRESET comes instead of EOF when it left data unread.
_GONE: Final = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN})

M = TypeVar("M")


class ChannelClosed(WireError):
    """The other side is gone, or this side has closed."""


class ChannelFull(WireError):
    """The other side has not read for so long that the queue is at its bound."""


class Frame:
    """A message ready to be sent: bytes left to send, descriptors that go with the first of them.

    Owns its descriptors until the kernel has taken them.
    """

    __slots__ = ("data", "fds")

    def __init__(self, data: bytes, fds: list[int]) -> None:
        self.data = memoryview(data)
        self.fds = fds

    def close(self) -> None:
        """Close the descriptors it still owns; idempotent."""
        close_all(self.fds)
        self.fds = []


class Channel(Generic[M]):
    """One end of a data channel; owns the socket and every descriptor that is in its queue.

    `send` and `flush` are safe from any thread; `receive` belongs to one thread, the one that
    also closes. `pack` may turn a value that is no plain msgpack type (a tensor) into a `Blob`
    before it is sent; `unpack` may turn a received `Blob` into something else.
    """

    def __init__(
        self,
        sock: socket.socket,
        receives: Any,
        *,
        pack: Callable[[Any], Any] | None = None,
        unpack: Callable[[Blob], Any] | None = None,
        max_frame: int = MAX_FRAME,
        max_queued_frames: int = MAX_QUEUED_FRAMES,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._codec: Codec[M] = Codec(receives, pack=pack, unpack=unpack)
        self._max_frame = max_frame
        self._max_queued_frames = max_queued_frames
        self._max_queued_bytes = max_queued_bytes
        self._lock = threading.Lock()
        self._out: deque[Frame] = deque()
        self._queued_bytes = 0
        self._broken: OSError | None = None
        self._closed = False
        self._portion = memoryview(bytearray(_READ_BYTES))
        self._in = bytearray()  # the beginning of a frame whose rest has not come
        self._in_fds: deque[int] = deque()
        self.eof = False
        """Whether the other side is gone and all it sent has been received."""

    def fileno(self) -> int:
        """Give the socket's number, -1 once closed."""
        return self._sock.fileno()

    # -- sending ---------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self._out

    @property
    def has_room(self) -> bool:
        """Whether one more frame may be queued."""
        return (
            len(self._out) < self._max_queued_frames and self._queued_bytes < self._max_queued_bytes
        )

    def send(self, message: Any) -> None:
        """Queue one message and send what the kernel takes at once; never blocks.

        When `idle` is False afterwards somebody has to `flush` once the socket is writable.

        Raises:
            ChannelClosed: nobody will ever read it.
            ChannelFull: the queue is at its bound; nothing was queued.
            FrameTooLarge: more than `max_frame` bytes or too many blobs.
            TypeError: a value that no frame can hold.
            OSError: no memory or no descriptors for its blobs.
        """
        self.post(self.frame(message))

    def frame(self, message: Any) -> Frame:
        """Do the part of `send` that depends on the message alone; raises what that can raise."""
        payload, fds = self._codec.encode(message)
        if len(payload) > self._max_frame:
            close_all(fds)
            raise FrameTooLarge(f"a frame of {len(payload)} bytes; {self._max_frame} at most")
        return Frame(_HEADER.pack(len(payload), len(fds)) + payload, fds)

    def post(self, frame: Frame) -> None:
        """Do the rest of `send`; takes the frame over, whatever happens."""
        with self._lock:
            if self._closed or self._broken is not None:
                frame.close()
                raise ChannelClosed("the other side of the data channel is gone")
            if not self.has_room:
                frame.close()
                raise ChannelFull(f"{len(self._out)} frames wait and nobody reads them")
            self._out.append(frame)
            self._queued_bytes += len(frame.data)
            self._flush()

    def flush(self) -> bool:
        """Send what the kernel takes; give whether nothing is left waiting."""
        with self._lock:
            self._flush()
            return not self._out

    def _flush(self) -> None:
        while self._out:
            frame = self._out[0]
            try:
                sent = self._send_some(frame)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                # Also ETOOMANYREFS and ENOBUFS: a frame that cannot be completed poisons the
                # stream behind it, so the channel is over either way, and both readers see it.
                self._broken = error
                self._drop_queue()
                with suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
                return
            if frame.fds:
                frame.close()
            self._queued_bytes -= sent
            if sent < len(frame.data):
                frame.data = frame.data[sent:]
                return
            self._out.popleft()

    def _send_some(self, frame: Frame) -> int:
        if not frame.fds:
            return self._sock.send(frame.data, _SEND_FLAGS)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", frame.fds))
        return self._sock.sendmsg([frame.data], [rights], _SEND_FLAGS)

    def _drop_queue(self) -> None:
        for frame in self._out:
            frame.close()
        self._out.clear()
        self._queued_bytes = 0

    # -- receiving -------------------------------------------------------------------------

    def receive(self) -> list[M]:
        """Give the messages that have arrived whole; never blocks. Sets `eof` at the end.

        Raises:
            WireError: what came is no frame, or descriptors were lost on the way (EMFILE).
                The channel cannot be used any more.
        """
        messages: list[M] = []
        for _ in range(_READS_PER_CALL):
            if self.eof:
                break
            size = self._read()
            if size:
                self._take(size, messages)
            if size < _READ_BYTES:  # what has come since makes the socket readable again
                break
        return messages

    def _read(self) -> int:
        """Take one portion from the socket into `_portion`; give its size."""
        try:
            size, ancillary, flags, _ = self._sock.recvmsg_into(
                [self._portion], _ANCILLARY, _READ_FLAGS
            )
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            if error.errno not in _GONE:
                raise WireError(f"reading the data channel: {error.strerror}") from error
            self.eof = True
            return 0
        for level, kind, rights in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(rights[: len(rights) - len(rights) % numbers.itemsize])
                self._in_fds.extend(numbers)
        if flags & _TRUNCATED:
            raise WireError("file descriptors were lost on the way: no free ones (EMFILE)?")
        if not size:
            self.eof = True
        return size

    def _take(self, size: int, messages: list[M]) -> None:
        """Decode what is whole now, from the portion itself where it can be."""
        with self._portion[:size] as portion:
            if not self._in:
                end = self._decode_from(portion, messages)
                self._in += portion[end:]
                return
            self._in += portion
        with memoryview(self._in) as whole:
            end = self._decode_from(whole, messages)
        del self._in[:end]

    def _decode_from(self, data: memoryview, messages: list[M]) -> int:
        """Decode the whole frames at the beginning of `data`; give where they end."""
        at = 0
        while len(data) - at >= _HEADER.size:
            length, n_fds = _HEADER.unpack_from(data, at)
            if length > self._max_frame or n_fds > MAX_FDS:
                raise WireError(f"not a frame: {length} bytes and {n_fds} descriptors announced")
            start = at + _HEADER.size
            if len(data) - start < length:
                break
            # A batch of descriptors arrives with the first byte of its frame and recvmsg never
            # joins two batches, so the oldest descriptors are this frame's.
            if len(self._in_fds) < n_fds:
                raise WireError(f"{n_fds} descriptors announced, {len(self._in_fds)} came")
            fds = [self._in_fds.popleft() for _ in range(n_fds)]
            at = start + length
            with data[start:at] as payload:
                messages.append(self._codec.decode(payload, fds))
        return at

    # -- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        """Close the socket and every descriptor still held; idempotent."""
        with self._lock:
            self._closed = True
            self._drop_queue()
            self._sock.close()
        close_all(list(self._in_fds))
        self._in_fds.clear()
