"""The payload of a data-channel frame: one struct as msgpack, its blobs beside it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec
from msgspec.msgpack import Ext

from stopbath.wire._blobs import INLINE_MAX, Blob, BlobError, read_sealed, seal

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MAX_FDS", "Codec", "FrameTooLarge", "WireError", "close_all"]

MAX_FDS: Final = 64
"""Descriptors of one frame (the kernel's own limit is 253)."""

# Extension codes. The data of each is msgpack of the tuple beside it.
_INLINE_BLOB: Final = 1  # (dtype, shape, bytes)
_SEALED_BLOB: Final = 2  # (dtype, shape, bytes long, index of the descriptor)
_SEALED_BYTES: Final = 3  # (bytes long, index of the descriptor)

_Shape = tuple[int, ...]
_inline_blob = msgspec.msgpack.Decoder(tuple[str, _Shape, bytes])
_sealed_blob = msgspec.msgpack.Decoder(tuple[str, _Shape, int, int])
_sealed_bytes = msgspec.msgpack.Decoder(tuple[int, int])
_encode = msgspec.msgpack.Encoder().encode

M = TypeVar("M")


class WireError(Exception):
    """The data channel cannot go on; the message says why."""


class FrameTooLarge(WireError, ValueError):
    """A message that does not fit in one frame."""


def close_all(fds: list[int]) -> None:
    """Close every descriptor; one that is closed already does not stop the others."""
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            continue


class Codec(Generic[M]):
    """Turns messages into payload and descriptors, and back.

    Decoding belongs to one thread; encoding is safe from any.
    """

    def __init__(
        self,
        receives: Any,
        *,
        pack: Callable[[Any], Any] | None = None,
        unpack: Callable[[Blob], Any] | None = None,
    ) -> None:
        self._pack = pack
        self._unpack = unpack
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(
            receives, ext_hook=self._read_ext
        )
        self._fds: list[int | None] = []

    def encode(self, message: Any) -> tuple[bytes, list[int]]:
        """Give the payload and its descriptors, which the caller owns from here on.

        Raises:
            TypeError: a value that is neither a msgpack type nor a blob.
            FrameTooLarge: more than `MAX_FDS` large blobs.
            OSError: no memory or no descriptors left for a blob.
        """
        fds: list[int] = []

        def other(value: Any) -> Any:
            # What msgspec does not know itself: a tensor in the rank, a blob.
            packed = self._pack(value) if self._pack is not None else value
            if isinstance(packed, Blob):
                return _write_blob(packed, fds)
            raise TypeError(f"{type(value).__name__} cannot travel in a frame")

        try:
            payload = msgspec.msgpack.encode(message, enc_hook=other)
            if len(payload) > INLINE_MAX:  # there may be bytes in it that belong beside it
                close_all(fds)
                fds.clear()
                aside = self._with_bytes_aside(message, fds)
                payload = msgspec.msgpack.encode(aside, enc_hook=other)
        except BaseException:
            close_all(fds)
            raise
        return payload, fds

    def _with_bytes_aside(self, message: Any, fds: list[int]) -> Any:
        def walk(value: Any) -> Any:
            if isinstance(value, bytes | bytearray | memoryview):
                return self._write_bytes(value, fds)
            if isinstance(value, dict):
                return {key: walk(item) for key, item in value.items()}
            if isinstance(value, list | tuple):
                return [walk(item) for item in value]
            return value

        plain = {name: walk(getattr(message, name)) for name in message.__struct_fields__}
        return type(message)(**plain)

    def _write_bytes(self, value: bytes | bytearray | memoryview, fds: list[int]) -> Any:
        size = memoryview(value).nbytes
        if size <= INLINE_MAX:
            return value
        return Ext(_SEALED_BYTES, _encode((size, _add(fds, seal(value)))))

    def decode(self, payload: bytes | memoryview, fds: list[int]) -> M:
        """Read one message; takes the descriptors over, whatever happens.

        Raises:
            WireError: not a message of the expected kind, or a blob that does not hold what
                it says.
        """
        self._fds = list(fds)
        try:
            return self._decoder.decode(payload)
        except (msgspec.MsgspecError, BlobError, OSError, ValueError, IndexError) as error:
            raise WireError(f"not a message: {error}") from error
        finally:
            close_all([fd for fd in self._fds if fd is not None])
            self._fds = []

    def _read_ext(self, code: int, data: memoryview) -> Any:
        if code == _SEALED_BYTES:
            size, index = _sealed_bytes.decode(data)
            return read_sealed(self._held(index), size)
        if code == _INLINE_BLOB:
            dtype, shape, raw = _inline_blob.decode(data)
            return self._give(Blob(raw, dtype, shape))
        if code == _SEALED_BLOB:
            dtype, shape, size, index = _sealed_blob.decode(data)
            blob = Blob.adopt(self._held(index), size, dtype, shape)
            self._fds[index] = None  # the blob's own now
            return self._give(blob)
        raise WireError(f"unknown extension {code}")

    def _held(self, index: int) -> int:
        fd = self._fds[index] if 0 <= index < len(self._fds) else None
        if fd is None:
            raise WireError(f"descriptor {index} is not there")
        return fd

    def _give(self, blob: Blob) -> Any:
        return blob if self._unpack is None else self._unpack(blob)


def _add(fds: list[int], fd: int) -> int:
    fds.append(fd)
    if len(fds) > MAX_FDS:
        raise FrameTooLarge(f"more than {MAX_FDS} large blobs in one frame")
    return len(fds) - 1


def _write_blob(blob: Blob, fds: list[int]) -> Ext:
    shape = list(blob.shape)
    if blob.nbytes <= INLINE_MAX:
        return Ext(_INLINE_BLOB, _encode((blob.dtype, shape, blob.data)))
    return Ext(_SEALED_BLOB, _encode((blob.dtype, shape, blob.nbytes, _add(fds, blob.sealed()))))
