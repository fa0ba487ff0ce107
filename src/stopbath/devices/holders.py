"""Who has a device file open, from /proc: what NVML does not list holds memory too."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DEVICE_FILES", "Holder", "holders"]

DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/renderD")
"""How the device files of accelerators begin: NVIDIA's, and AMD's two."""


class Holder(NamedTuple):
    """A process and the device files it has open."""

    pid: int
    files: tuple[str, ...]


def holders(prefixes: Sequence[str] = DEVICE_FILES) -> tuple[list[Holder], int]:
    """Find every holder; and the number of processes that could not be looked at.

    Other users' descriptors are for root to read: without it the list is only of one's own.
    """
    found, unreadable = [], 0
    for name in os.listdir("/proc"):  # noqa: PTH208  (hundreds of entries, names only)
        if not name.isdigit():
            continue
        try:
            files = {file for file in _open_files(name) if file.startswith(tuple(prefixes))}
        except PermissionError:
            unreadable += 1
            continue
        except OSError:  # has ended
            continue
        if files:
            found.append(Holder(int(name), tuple(sorted(files))))
    return found, unreadable


def _open_files(pid: str) -> set[str]:
    where = f"/proc/{pid}/fd"
    files = set()
    for fd in os.listdir(where):  # noqa: PTH208
        try:
            files.add(os.readlink(f"{where}/{fd}"))  # noqa: PTH115
        except FileNotFoundError:  # closed meanwhile
            continue
    return files
