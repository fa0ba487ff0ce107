"""The data channel between the server and a rank: msgpack frames on a Unix stream socketpair.

A frame is an 8-byte header (payload length and number of file descriptors, both little-endian
u32), then the payload: msgpack of one struct of `messages.py`. Descriptors travel by SCM_RIGHTS
with the header's bytes. `bytes` and `Blob` values above `INLINE_MAX` travel as sealed memfds, so
nothing has a name, nothing appears in /dev/shm, and the kernel frees the memory with the last
holder, whoever is killed when.

Nothing here blocks: what the kernel does not take at once waits in a bounded queue until the
thread that watches the socket calls `flush`.
"""

from __future__ import annotations

from stopbath.wire._blobs import INLINE_MAX, Blob
from stopbath.wire._channel import MAX_FRAME, Channel, ChannelClosed, ChannelFull, Frame
from stopbath.wire._frames import FrameTooLarge, WireError

__all__ = [
    "INLINE_MAX",
    "MAX_FRAME",
    "Blob",
    "Channel",
    "ChannelClosed",
    "ChannelFull",
    "Frame",
    "FrameTooLarge",
    "WireError",
]
