"""`run --watch`: which processes of a command must live, and what follows when one does not.

An engine whose rank has died often sits there, holds its devices and says nothing. Its tree is
looked through, with back-off, only until everything asked for is there; from then on the
pidfds of those processes tell, at once and at no cost. Looking is done on a thread of its own:
reading the command line of a process that hangs in the kernel can hang too.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from stopbath.lifecycle._process import ProcessRef, read_stat, tree_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stopbath.lifecycle._supervisor import Supervisor

__all__ = ["DEVICE", "Watch", "Watched"]

DEVICE = "device"
_DEVICE_FILES = "/dev/nvidia"
_FIRST_S, _LONGEST_S = 0.02, 1.0
_AGAIN_S = 0.25  # for a replacement of one that died to come to live
_AGAIN_EVERY_S = 0.03


class Watched(NamedTuple):
    """At least so many living processes whose title has `name` in it; `device`: that hold one."""

    name: str
    least: int

    def __str__(self) -> str:
        return f"{self.name}:{self.least}"


class Watch:
    """The processes that must live. Everything but the looking is on the supervisor's thread."""

    def __init__(
        self,
        wanted: Iterable[Watched],
        within_s: float,
        sup: Supervisor,
        fault: Callable[[str], None],
        but: Callable[[], set[int]],
    ) -> None:
        self._wanted = tuple(wanted)
        self._within_s = within_s
        self._sup, self._fault, self._but = sup, fault, but
        self._held: dict[Watched, dict[int, ProcessRef]] = {it: {} for it in self._wanted}
        self._seen = dict.fromkeys(self._wanted, 0)
        self._found = False
        self._over = threading.Event()

    def begin(self) -> None:
        """Start to look; the time to come to live begins now."""
        self._sup.call_at(time.monotonic() + self._within_s, self._overdue)
        threading.Thread(target=self._seek, name="stopbath-watch", daemon=True).start()

    def end(self) -> None:
        """The run is being stopped: nothing is looked for any more, no death means anything."""
        self._over.set()
        for held in self._held.values():
            for ref in held.values():
                self._sup.unwatch_fd(ref.fileno())
                ref.close()
            held.clear()

    # -- the looking (a thread of its own)

    def _seek(self) -> None:
        pause_s = _FIRST_S
        while not self._over.is_set():
            found = self._look()
            if all(len(found[it]) >= it.least for it in self._wanted):
                self._sup.post(functools.partial(self._hold, found))
                return
            self._over.wait(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_S)

    def _look(self) -> dict[Watched, list[int]]:
        found: dict[Watched, list[int]] = {it: [] for it in self._wanted}
        but = self._but()
        for pid in tree_of(os.getpid()):
            if pid not in but:
                for it in self._wanted:
                    if _is(it, pid):
                        found[it].append(pid)
        for it, pids in found.items():
            self._seen[it] = len(pids)
        return found

    def _look_again(self, lost: Watched, what: str) -> None:
        until = time.monotonic() + _AGAIN_S
        found = self._look()
        while len(found[lost]) < lost.least and time.monotonic() < until:
            if self._over.wait(_AGAIN_EVERY_S):
                return
            found = self._look()
        self._sup.post(functools.partial(self._replace, lost, found, what))

    # -- what follows

    def _hold(self, found: dict[Watched, list[int]]) -> None:
        if self._over.is_set():
            return
        for it, pids in found.items():
            for pid in pids:
                self._take(it, pid)
        self._found = True
        for it in self._wanted:  # one may have ended between the look and now
            if len(self._held[it]) < it.least:
                self._lost(it, "a process that had just come to live died")

    def _take(self, it: Watched, pid: int) -> None:
        if pid in self._held[it]:
            return
        stat = read_stat(pid)
        try:
            ref = ProcessRef.open(pid, stat.start if stat is not None else None)
        except OSError:
            return
        self._held[it][pid] = ref
        self._sup.watch_fd(ref.fileno(), lambda: self._died(it, ref))

    def _died(self, it: Watched, ref: ProcessRef) -> None:
        self._sup.unwatch_fd(ref.fileno())
        ref.close()
        del self._held[it][ref.pid]
        if len(self._held[it]) < it.least:
            what = "the last holder died" if it.name == DEVICE else "the last of them died"
            self._lost(it, f"pid {ref.pid} died" if self._held[it] or it.least > 1 else what)

    def _lost(self, it: Watched, what: str) -> None:
        look = threading.Thread(target=self._look_again, args=(it, what), daemon=True)
        late = time.monotonic() + 2 * _AGAIN_S  # for a look that hangs
        self._sup.call_at(late, lambda: self._short(it, what))
        look.start()

    def _replace(self, it: Watched, found: dict[Watched, list[int]], what: str) -> None:
        if self._over.is_set():
            return
        for pid in found[it]:
            self._take(it, pid)
        self._short(it, what)

    def _short(self, it: Watched, what: str) -> None:
        if not self._over.is_set() and len(self._held[it]) < it.least:
            self._give_up(f"lost --watch {it}: {what}, {len(self._held[it])} left")

    def _overdue(self) -> None:
        if self._over.is_set() or self._found:
            return
        short = next((it for it in self._wanted if self._seen[it] < it.least), self._wanted[0])
        self._give_up(f"has {self._seen[short]} of --watch {short} after {self._within_s:g} s")

    def _give_up(self, what: str) -> None:
        self.end()
        self._fault(what)


def _is(it: Watched, pid: int) -> bool:
    return holds_device(pid) if it.name == DEVICE else it.name in title_of(pid)


def title_of(pid: int) -> str:
    """Give what a process is called: its arguments, which engines overwrite with a title."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4096).replace(b"\0", b" ").strip()
        if not words:
            with open(f"/proc/{pid}/comm", "rb") as file:
                words = file.read().strip()
    except OSError:
        return ""
    return words.decode("utf-8", "replace")


def holds_device(pid: int) -> bool:
    """Whether a process has a file of an NVIDIA device open."""
    where = f"/proc/{pid}/fd"
    try:
        return any(
            os.readlink(f"{where}/{name}").startswith(_DEVICE_FILES) for name in os.listdir(where)
        )
    except OSError:
        return False
