"""The keeper's last look at what a command has bound, when the guardian is dead.

The guardian's finder looks on a schedule that backs off; a socket that was bound since is proved
by nobody when the guardian is killed. So the keeper looks, before it kills. Only where looking
cannot hang (descriptors and the kernel's table, no memory map, no file system): nothing may come
between the guardian's death and the end of what it ran. The files are looked at afterwards.
"""

from __future__ import annotations

import os
import time

from stopbath.lifecycle._belongings import (
    bound_by,
    bound_sockets,
    descriptors_of,
    socket_at,
    socket_inode,
)
from stopbath.lifecycle._process import tree_of

TYPE_CHECKING = False  # as `typing` has it
if TYPE_CHECKING:
    from stopbath.lifecycle._belongings import Before
    from stopbath.lifecycle._registry import Record

__all__ = ["LastLook"]

_LONGEST_S = 0.05


class LastLook:
    """Sockets of the tree below this process that were not bound `before` its command."""

    __slots__ = ("_before", "_paths")

    def __init__(self, before: Before) -> None:
        self._before = before
        self._paths: list[str] = []

    def look(self) -> None:
        """Remember which paths sockets of the tree are bound to, and of nobody else's."""
        owners = _sockets(time.monotonic() + _LONGEST_S)
        for path, where in bound_by(owners, bound_sockets(), self._before.sockets).items():
            self._paths.append(path if path.startswith("/") else f"{where}/{path}")

    def note(self, record: Record) -> None:
        """Everything is dead: record what is there, for whoever clears up."""
        for path in self._paths:
            there = socket_at(path)
            if there is not None:
                record.note_resource("socket", path=path, dev=there.dev, ino=there.ino)


def _sockets(until: float) -> dict[int, str]:
    """Map the sockets of the tree to the working directory of a process that has them."""
    found: dict[int, str] = {}
    for pid in tree_of(os.getpid()):
        if time.monotonic() > until:
            break
        try:
            where = os.readlink(f"/proc/{pid}/cwd")
            for _, target in descriptors_of(pid):
                inode = socket_inode(target)
                if inode is not None:
                    found.setdefault(inode, where)
        except OSError:
            continue  # has ended, or is another user's
    return found
