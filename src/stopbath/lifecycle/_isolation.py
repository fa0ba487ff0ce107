"""A PID namespace around a run: `run --isolate pid`, for whoever has the privilege.

The keeper is its PID 1. When that ends, however, the kernel ends everything in it, so that even
a keeper and a guardian killed in the same instant leave nothing (pid_namespaces(7)). Numbers
told to the guardian are those of its own namespace.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stopbath.lifecycle._process import ProcessRef

__all__ = ["OwnProc", "PidNamespace"]

_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x4000, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: object) -> None:
    if getattr(_libc, name)(*args) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


class PidNamespace:
    """While in the `with` block, what this process forks is the first of a new namespace.

    Afterwards it starts threads and processes in its own again: the kernel refuses a thread to
    a process whose children would live elsewhere.
    """

    def __enter__(self) -> None:
        self._own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _call("unshare", _CLONE_NEWPID)
        except OSError:
            os.close(self._own)
            raise

    def __exit__(self, *_: object) -> None:
        try:
            _call("setns", self._own, _CLONE_NEWPID)
        finally:
            os.close(self._own)


class OwnProc:
    """The /proc of a new PID namespace, mounted by its PID 1 for itself and its children alone.

    Keeps the outer one open, in which a process has the number that the guardian knows.
    """

    def __init__(self) -> None:
        self._outer = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        _call("unshare", _CLONE_NEWNS)
        _call("mount", None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
        flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        _call("mount", b"proc", b"/proc", b"proc", flags, None)

    def number(self, ref: ProcessRef) -> int:
        """Give the number a process has outside; its own when it has ended and was reaped."""
        try:
            path = f"self/fdinfo/{ref.fileno()}"
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._outer)
            try:
                lines = os.read(fd, 4096).split(b"\n")
            finally:
                os.close(fd)
        except OSError:
            return ref.pid
        told = next((int(line[4:]) for line in lines if line.startswith(b"Pid:")), 0)
        return told if told > 0 else ref.pid
