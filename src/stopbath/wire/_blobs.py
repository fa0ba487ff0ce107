"""Large values as sealed memfds: memory with no name that dies with its last holder."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Final

__all__ = ["INLINE_MAX", "Blob", "BlobError", "read_sealed", "seal"]

Buffer = bytes | bytearray | memoryview

INLINE_MAX: Final = 64 << 10
"""Bytes up to which a value travels inside its frame."""

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class BlobError(Exception):
    """A descriptor that is not the sealed memory it is said to be."""


def seal(data: Buffer) -> int:
    """Copy `data` into a new memfd, sealed for good; the caller owns the descriptor.

    Written with write(2) and never mapped: F_SEAL_WRITE is refused (EBUSY) while a writable
    mapping exists.

    Raises:
        OSError: no memory, or no descriptors left.
    """
    fd = os.memfd_create("stopbath-blob", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        left = memoryview(data).cast("B")
        while left:
            left = left[os.write(fd, left) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(fd: int, size: int) -> None:
    """Refuse memory that its sender could still shrink: reading that would be SIGBUS."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise BlobError("not a memfd") from error
    if seals & _SEALS != _SEALS:
        raise BlobError("a memfd that is not sealed")
    if (actual := os.fstat(fd).st_size) != size:
        raise BlobError(f"a blob of {actual} bytes where {size} were announced")


def read_sealed(fd: int, size: int) -> bytes:
    """Copy a sealed memfd of `size` bytes out; the descriptor stays the caller's.

    Raises:
        BlobError: it is not sealed or not that long.
    """
    _check(fd, size)
    parts, at = [], 0
    while at < size and (part := os.pread(fd, size - at, at)):
        parts.append(part)
        at += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class Blob:
    """An array as it travels: raw bytes (C order), the name of a dtype, a shape.

    `dtype` is the name that torch and numpy share ("float32", "uint8" …) and means nothing to
    this layer. A received blob above `INLINE_MAX` holds a descriptor until its `data` is first
    looked at, then a private mapping; a blob that is only handed on is never mapped.
    """

    __slots__ = ("_data", "_fd", "dtype", "nbytes", "shape")

    def __init__(
        self, data: Buffer, dtype: str = "uint8", shape: tuple[int, ...] | None = None
    ) -> None:
        self._fd = -1  # first: __del__ also runs when the rest of this fails
        self._data: memoryview | None = None
        self._data = memoryview(data).cast("B")
        self.dtype = dtype
        self.nbytes = self._data.nbytes
        self.shape = (self.nbytes,) if shape is None else shape

    @classmethod
    def adopt(cls, fd: int, nbytes: int, dtype: str, shape: tuple[int, ...]) -> Blob:
        """Make a blob of a received memfd; it owns `fd` from here on, unless this raises.

        Raises:
            BlobError: it is not sealed or not `nbytes` long.
        """
        _check(fd, nbytes)
        blob = cls(b"", dtype, shape)
        blob._fd, blob._data, blob.nbytes = fd, None, nbytes
        return blob

    @property
    def data(self) -> memoryview:
        """The bytes; what is written to them nobody else sees (the mapping is private)."""
        if self._data is None:
            if self._fd < 0:
                raise ValueError("the blob is closed")
            pages = mmap.mmap(self._fd, self.nbytes, flags=mmap.MAP_PRIVATE)
            self._data = memoryview(pages)
            os.close(self._fd)  # mmap keeps a duplicate of its own, for as long as it lives
            self._fd = -1
        return self._data

    def sealed(self) -> int:
        """Give a new descriptor of the sealed bytes, the caller's to close."""
        return os.dup(self._fd) if self._fd >= 0 else seal(self.data)

    def close(self) -> None:
        """Let the memory go; idempotent. Views of `data` that still exist keep theirs."""
        self._data = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        where = "descriptor" if self._fd >= 0 else "memory" if self._data is not None else "closed"
        return f"<Blob {self.dtype}{list(self.shape)} {self.nbytes} bytes, {where}>"
