"""What dead workers left: taken on, signalled, awaited, reaped. The keeper's, and only its."""

from __future__ import annotations

import signal

from stopbath.lifecycle._process import ProcessRef, Stat, children, read_stat, reap_pid

TYPE_CHECKING = False  # as `typing` has it, which this process does without
if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from stopbath.lifecycle._channel import Frame

__all__ = ["WORKER_MARK", "Strays"]

WORKER_MARK = "STOPBATH_WORKER"
"""In the environment of a worker: says whose a stray is that left the worker's session."""


class _Stray:
    """A process that a dead worker left, signalled and awaited."""

    __slots__ = ("argv", "number", "owner", "ref", "sent")

    def __init__(self, ref: ProcessRef, argv: str, number: int) -> None:
        self.ref, self.argv, self.number = ref, argv, number
        self.owner: object = None  # the dead child that left it; None while nobody knows
        self.sent: int | None = None

    def send(self, number: int) -> None:
        """Signal it, stopped or not."""
        self.ref.try_send(number)
        self.ref.try_send(signal.SIGCONT)
        self.sent = number

    @property
    def outcome(self) -> str:
        """Name what ended it, for the report."""
        if self.sent is None:
            return "exited"
        return "killed" if self.sent == signal.SIGKILL else "terminated"


class Strays:
    """The strays of one keeper; true while there are any.

    `owner_of` finds whose one is, from its session and its `WORKER_MARK`. One that is nobody's
    for sure may be anybody's.
    """

    __slots__ = ("_by_pid", "_ended", "_number", "_owner_of", "signal")

    def __init__(
        self, number: Callable[[ProcessRef], int], owner_of: Callable[[int, str], object]
    ) -> None:
        self._number, self._owner_of = number, owner_of
        self._by_pid: dict[int, _Stray] = {}
        self._ended: list[tuple[object, Frame]] = []  # not told of yet
        # What one gets when it comes to us. A worker's strays end with it; those of somebody
        # else's command get nothing until the guardian says so.
        self.signal: int | None = signal.SIGKILL

    def __bool__(self) -> bool:
        return bool(self._by_pid)

    def __contains__(self, pid: int) -> bool:
        return pid in self._by_pid

    def adopt(self, own: Container[int], *, take: bool, spare: Container[int] = ()) -> bool:
        """One pass over the children that are not our `own`: reap the dead, take on the new.

        Whether others are left than before. `take` is False while what comes to us may still be
        somebody's: a living command's daemons are no strays. What is in one of the sessions to
        `spare` is being born of a zygote, or is its helper for as long as it lives.
        """
        before = set(self._by_pid)
        for pid in children():
            if pid in own:
                continue
            stat = read_stat(pid)
            if stat is None:
                continue
            if stat.state == "Z":
                self._lay_to_rest(pid, stat)
            elif take and pid not in self._by_pid and stat.session not in spare:
                self._take_on(pid, stat)
        return self._by_pid.keys() != before

    def send(self, number: int) -> None:
        """Signal every one of them, now and when it comes."""
        self.signal = number
        for stray in self._by_pid.values():
            stray.send(number)

    def left(self, owner: object) -> list[Frame]:
        """Name those that are still there and are `owner`'s, or may be."""
        mine = (it for it in self._by_pid.values() if it.owner in {owner, None})
        return [{"pid": it.number, "argv": it.argv} for it in mine]

    def take_ended(self, owner: object) -> list[Frame]:
        """Give the account of those that have ended and are `owner`'s, or may be; once."""
        mine = [it for whose, it in self._ended if whose in {owner, None}]
        self._ended = [it for it in self._ended if it[0] not in {owner, None}]
        return mine

    def _take_on(self, pid: int, stat: Stat) -> None:
        argv = _argv(pid) or f"[{stat.name}]"  # its memory is gone already when it is ending
        try:
            ref = ProcessRef.open(pid)
        except ProcessLookupError:
            return
        stray = self._by_pid[pid] = _Stray(ref, argv, self._number(ref))
        stray.owner = self._owner_of(stat.session, _mark(pid))
        if self.signal is not None:
            stray.send(self.signal)

    def _lay_to_rest(self, pid: int, stat: Stat) -> None:
        """Reap what came to us. What died with its group or cgroup is dead before it was seen."""
        stray = self._by_pid.pop(pid, None)
        end = reap_pid(pid)
        if stray is not None:
            stray.ref.close()
            told = {"pid": stray.number, "argv": stray.argv, "outcome": stray.outcome}
            self._ended.append((stray.owner, told))
        elif end is not None and end.signal == signal.SIGKILL:
            told = {"pid": pid, "argv": f"[{stat.name}]", "outcome": "killed"}
            self._ended.append((self._owner_of(stat.session, ""), told))


def _mark(pid: int) -> str:
    """Give the mark of the worker in whose environment a process was born; a hint, no proof."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return ""
    begin = f"{WORKER_MARK}=".encode()
    return next((it[len(begin) :].decode() for it in words if it.startswith(begin)), "")


def _argv(pid: int) -> str:
    """Give a stray's command line, shortened, for the report."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(400).replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""
