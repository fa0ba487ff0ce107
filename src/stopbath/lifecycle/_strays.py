"""What dead workers left: taken on, signalled, awaited, reaped. The keeper's, and only its."""

from __future__ import annotations

import signal

from stopbath.lifecycle._process import ProcessRef, children, read_stat, reap_pid

TYPE_CHECKING = False  # as `typing` has it, which this process does without
if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from stopbath.lifecycle._channel import Frame

__all__ = ["Strays"]


class _Stray:
    """A process that a dead worker left, signalled and awaited."""

    __slots__ = ("argv", "number", "ref", "sent")

    def __init__(self, ref: ProcessRef, argv: str, number: int) -> None:
        self.ref, self.argv, self.number = ref, argv, number
        self.sent: int | None = None

    def send(self, number: int) -> None:
        """Signal it, stopped or not."""
        self.ref.send(number)
        self.ref.send(signal.SIGCONT)
        self.sent = number

    @property
    def outcome(self) -> str:
        """Name what ended it, for the report."""
        if self.sent is None:
            return "exited"
        return "killed" if self.sent == signal.SIGKILL else "terminated"


class Strays:
    """The strays of one keeper; true while there are any."""

    __slots__ = ("_by_pid", "_ended", "_number", "signal")

    def __init__(self, number: Callable[[ProcessRef], int]) -> None:
        self._number = number
        self._by_pid: dict[int, _Stray] = {}
        self._ended: list[Frame] = []  # those that have ended since the last word about them
        # What one gets when it comes to us. A worker's strays end with it; those of somebody
        # else's command get nothing until the guardian says so.
        self.signal: int | None = signal.SIGKILL

    def __bool__(self) -> bool:
        return bool(self._by_pid)

    def __contains__(self, pid: int) -> bool:
        return pid in self._by_pid

    def adopt(self, own: Container[int], *, take: bool) -> bool:
        """One pass over the children that are not our `own`: reap the dead, take on the new.

        Whether there was a new one. `take` is False while what comes to us may still be somebody's:
        a living command's daemons are no strays.
        """
        known = len(self._by_pid)
        for pid in children():
            if pid in own:
                continue
            stat = read_stat(pid)
            if stat is not None and stat.state == "Z":
                self._lay_to_rest(pid, stat.name)
            elif take and stat is not None and pid not in self._by_pid:
                self._take_on(pid, stat.name)
        return len(self._by_pid) > known

    def send(self, number: int) -> None:
        """Signal every one of them, now and when it comes."""
        self.signal = number
        for stray in self._by_pid.values():
            stray.send(number)

    def left(self) -> list[Frame]:
        """Name those that are still there."""
        return [{"pid": it.number, "argv": it.argv} for it in self._by_pid.values()]

    def take_ended(self) -> list[Frame]:
        """Give the account of those that have ended, once."""
        ended, self._ended = self._ended, []
        return ended

    def _take_on(self, pid: int, name: str) -> None:
        argv = _argv(pid) or f"[{name}]"  # its memory is gone already when it is ending
        try:
            ref = ProcessRef.open(pid)
        except ProcessLookupError:
            return
        stray = self._by_pid[pid] = _Stray(ref, argv, self._number(ref))
        if self.signal is not None:
            stray.send(self.signal)

    def _lay_to_rest(self, pid: int, name: str) -> None:
        """Reap what came to us. What died with its group or cgroup is dead before it was seen."""
        stray = self._by_pid.pop(pid, None)
        end = reap_pid(pid)
        if stray is not None:
            stray.ref.close()
            self._ended.append({"pid": stray.number, "argv": stray.argv, "outcome": stray.outcome})
        elif end is not None and end.signal == signal.SIGKILL:
            self._ended.append({"pid": pid, "argv": f"[{name}]", "outcome": "killed"})


def _argv(pid: int) -> str:
    """Give a stray's command line, shortened, for the report."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(400).replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""
