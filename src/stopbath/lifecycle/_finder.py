"""The thread that learns, while a command lives, what belongs to it, and clears it up after.

On a thread because reading /proc can hang with the process it is about; the guardian's loop,
which signals and waits, never does. It looks at births in /dev/shm (inotify(7)), at the first
stop signal, and on a schedule that backs off. What is proved goes into the run's record at
once, so that the keeper, or the next start, clears up after a guardian that was killed.
"""

from __future__ import annotations

import os
import select
import threading
import time
from typing import TYPE_CHECKING, Any

from stopbath.lifecycle._belongings import (
    Belonging,
    bound_sockets,
    everybody,
    held_by,
    pid_files,
    shared_memory,
    sockets_of,
)
from stopbath.lifecycle._leftovers import answers
from stopbath.lifecycle._process import tree_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopbath.lifecycle._belongings import Before
    from stopbath.lifecycle._deadline import Deadline
    from stopbath.lifecycle._registry import Record

__all__ = ["Finder", "nothing_swept"]

_FIRST_S, _LONGEST_S = 0.5, 60.0
_SHARE = 10  # at most one part in so many of the time is spent looking
_LEAST_S = 0.02  # between two looks
_ANOTHERS = "another user's"
_LOOK_S = 2.0  # a look at a host that is this slow is given up


def nothing_swept() -> dict[str, list[dict[str, Any]]]:
    """Give the account of a run that left nothing."""
    return {"removed": [], "inferred": [], "kept": []}


class Finder:
    """What belongs to the tree below this process, and was not there `before` its command."""

    def __init__(
        self, record: Record, before: Before, but: Callable[[], set[int]], *, all_of_it: bool
    ) -> None:
        self._record, self._but, self._all = record, but, all_of_it
        self._old, self._old_sockets = before.shm, before.sockets
        self._proved: dict[tuple[str, int, int], Belonging] = {}
        self._shared: set[tuple[int, int]] = set()  # somebody else held it when it was first seen
        self._born_ns, self._births = before.born_ns, before.births
        self._call = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._looked = threading.Event()
        self._ending = False
        self._result: dict[str, list[dict[str, Any]]] | None = None
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="stopbath-finder", daemon=True)
        self._thread.start()

    # -- the guardian's thread

    def look_now(self, within_s: float) -> None:
        """Have it look at once; waits, but not for one that hangs."""
        self._looked.clear()
        os.eventfd_write(self._call, 1)
        self._looked.wait(within_s)

    def finish(self, by: Deadline) -> dict[str, Any]:
        """Nothing of the tree is alive: clear up, and give the account."""
        self._ending = True
        os.eventfd_write(self._call, 1)
        self._thread.join(by.left_s())
        if self._result is not None:
            return self._result | ({"problem": self._problem} if self._problem else {})
        left = [dict(it._asdict(), why="there was no time left") for it in self._proved.values()]
        return nothing_swept() | {"kept": left, "problem": self._problem or "it took too long"}

    # -- its own

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._call, select.POLLIN)
        if self._births >= 0:
            poll.register(self._births, select.POLLIN)
        pause_s = _FIRST_S
        due = time.monotonic() + pause_s
        while True:
            fds = {fd for fd, _ in poll.poll(max(0.0, due - time.monotonic()) * 1000)}
            for fd in fds:
                _drain(fd)
            if self._ending:
                break
            if time.monotonic() >= due:
                pause_s = min(pause_s * 2, _LONGEST_S)
            began = time.monotonic()
            self._isolated(self._look)
            took = time.monotonic() - began
            if self._call in fds:
                self._looked.set()
            # A storm of births, or a slow host, must not become a storm of looks.
            rest_s = max(_LEAST_S, took * _SHARE)
            due = time.monotonic() + max(pause_s, rest_s)
            if self._births in fds:
                select.select([self._call], [], [], rest_s)
        self._isolated(self._clear_up)

    def _isolated(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._problem = repr(error)

    def _prove(self, it: Belonging) -> None:
        key = it.kind, it.dev, it.ino
        if key not in self._proved:
            self._proved[key] = it
            self._record.note_resource(**it._asdict())

    def _look(self) -> None:
        but = self._but()
        tree = [pid for pid in tree_of(os.getpid()) if pid not in but]
        held = held_by(tree, _for_a_while())
        names = shared_memory()
        known = {(dev, ino) for _, dev, ino in self._proved}
        new = {
            ident
            for ident in held.files & names.keys()
            if ident not in self._old and ident not in known and ident not in self._shared
        }
        if new:  # held by a stranger as well: it may be the stranger's, attached to by the tree
            mine = {*tree, *but, os.getpid()}
            others = held_by((pid for pid in everybody() if pid not in mine), _for_a_while())
            self._shared |= new & others.files
            for ident in new - self._shared:
                self._prove(Belonging("shm", names[ident], *ident))
        for it in sockets_of(held, bound_sockets(), self._old_sockets):
            self._prove(it)
        for it in (*held.locks, *pid_files(tree, _directories_of(tree[:1]))):
            if self._is_new(it.path):
                self._prove(it)

    def _is_new(self, path: str) -> bool:
        """A lock file that is older than the run is a cache's, or somebody's before us."""
        try:
            return os.lstat(path).st_ctime_ns >= self._born_ns
        except OSError:
            return False

    def _clear_up(self) -> None:
        result = nothing_swept()
        names = shared_memory()
        proved = set(self._proved)
        born = [
            Belonging("shm", path, *ident)
            for ident, path in sorted(names.items())
            if ident not in self._old | self._shared and ("shm", *ident) not in proved
        ]
        # Who holds what is asked of the whole host, and only when there is something to ask for.
        left = [it for it in self._proved.values() if os.path.lexists(it.path)]
        of_shm = born or any(it.kind == "shm" for it in left)
        held = held_by(everybody() if of_shm else (), _for_a_while())
        for it in left:
            why = self._why_not(it, held.files, hidden=held.hidden)
            if why is not None:
                self._settle(it, why, result)
        for it in born:
            why = self._why_not(it, held.files, hidden=held.hidden)
            if (it.dev, it.ino) in held.files or why is None:
                continue  # somebody's, or gone
            if self._all:
                self._settle(it, why, result)
            elif why != _ANOTHERS:
                result["inferred"].append(dict(it._asdict()))
        self._result = result

    def _settle(self, it: Belonging, why: str, result: dict[str, list[dict[str, Any]]]) -> None:
        if not why:
            try:
                os.unlink(it.path)
            except OSError as error:
                why = error.strerror or str(error)
        facts = dict(it._asdict())
        result["kept" if why else "removed"].append(facts | ({"why": why} if why else {}))

    def _why_not(  # noqa: PLR0911  (one for each reason)
        self, it: Belonging, held: set[tuple[int, int]], *, hidden: bool
    ) -> str | None:
        """Say why something is to stay, `""` when it is to go, None when it is gone already."""
        try:
            about = os.lstat(it.path)
        except OSError:
            return None
        if (about.st_dev, about.st_ino) != (it.dev, it.ino):
            return None
        if about.st_uid != os.geteuid():
            return _ANOTHERS
        if it.kind == "socket":
            return "somebody listens on it" if answers(it.path) else ""
        if it.kind == "lock":
            return "" if self._all else "lock files are removed on request: --remove-inferred"
        if (it.dev, it.ino) in held:
            return "somebody holds it"
        unseen = hidden and about.st_mode & 0o077
        return "not provable: not every process can be looked at" if unseen else ""


def _directories_of(pids: list[int]) -> list[str]:
    try:
        return [os.readlink(f"/proc/{pid}/cwd") for pid in pids]
    except OSError:
        return []


def _for_a_while() -> Callable[[], bool]:
    until = time.monotonic() + _LOOK_S
    return lambda: time.monotonic() < until


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 65536):
            pass
    except BlockingIOError:
        return
