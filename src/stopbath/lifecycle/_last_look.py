"""The keeper's last look at what a command has bound, when the guardian is dead.

The guardian's finder looks on a schedule that backs off; a socket that was bound since is proved
by nobody when the guardian is killed. So the keeper looks, before it kills. Only where looking
cannot hang (descriptors and the kernel's table, no memory map, no file system): nothing may come
between the guardian's death and the end of what it ran. The files are looked at afterwards.
"""

from __future__ import annotations

import os
import stat
import time

from stopbath.lifecycle._belongings import bound_sockets
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
        table = bound_sockets()
        others = {path for inode, path in table.items() if inode not in owners}
        for inode, path in table.items():
            if inode in owners and path not in others and path not in self._before.sockets:
                whole = path if path.startswith("/") else f"{owners[inode]}/{path}"
                self._paths.append(whole)

    def note(self, record: Record) -> None:
        """Everything is dead: record what is there, for whoever clears up."""
        for path in self._paths:
            try:
                about = os.lstat(path)
            except OSError:
                continue  # removed by its owner
            if stat.S_ISSOCK(about.st_mode):
                record.note_resource("socket", path=path, dev=about.st_dev, ino=about.st_ino)


def _sockets(until: float) -> dict[int, str]:
    """Map the sockets of the tree to the working directory of a process that has them."""
    found: dict[int, str] = {}
    for pid in tree_of(os.getpid()):
        if time.monotonic() > until:
            break
        try:
            where = os.readlink(f"/proc/{pid}/cwd")
            for fd in os.listdir(f"/proc/{pid}/fd"):
                target = _target(f"/proc/{pid}/fd/{fd}")
                if target.startswith("socket:["):
                    found.setdefault(int(target[8:-1]), where)
        except OSError:
            continue  # has ended, or is another user's
    return found


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:  # closed meanwhile
        return ""
