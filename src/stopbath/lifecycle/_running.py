"""What `run` adds to the guardian: somebody else's command, its terminal, and what it leaves."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

from stopbath.lifecycle._command import Command
from stopbath.lifecycle._deadline import Deadline
from stopbath.lifecycle._finder import Finder
from stopbath.lifecycle._process import read_stat, stop_self
from stopbath.lifecycle._state import GroupState
from stopbath.lifecycle._words import forward

if TYPE_CHECKING:
    from stopbath.lifecycle._core import GroupCore
    from stopbath.lifecycle._process import Arrival
    from stopbath.lifecycle._registry import Record
    from stopbath.lifecycle._spawn import KeeperClient
    from stopbath.lifecycle._supervisor import Supervisor

__all__ = ["Running"]

_PROVE_S = 0.02  # what the first signal waits for a look at what the tree owns
_CLEAR_UP_S = 3.0
_LAST_WORDS_S = 2.0  # for a slow reader of our stderr, at the end
_MOST_LINES = 8
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH)


class Running:
    """One command. Everything here is called on the guardian's loop."""

    def __init__(
        self, job: dict[str, Any], keeper: KeeperClient, sup: Supervisor, record: Record
    ) -> None:
        self._job, self._keeper, self._sup = job, keeper, sup
        self._core: GroupCore | None = None
        self._terminal = None
        if job["tty"]:
            from stopbath.lifecycle._terminal import Terminal

            self._terminal = Terminal()
        _let_go(job["inherited"])
        self._tee = None
        if job["capture"]:
            from stopbath.lifecycle._tee import Tee

            self._tee = Tee()
            self._tee.on_blocked = self._await_reader
        before, all_of_it = job["before"], job["remove_inferred"]
        self._finder = Finder(record, before, self._not_of_the_tree, all_of_it=all_of_it)
        self._watch = None
        if job["watch"]:
            from stopbath.lifecycle._watch import Watch, Watched

            wanted = [Watched(*it) for it in job["watch"]]
            within_s = job["watch_within_s"]
            self._watch = Watch(wanted, within_s, sup, self._fault, self._not_to_be_watched)
        self.lost = False  # a process that had to live did not
        self.command = Command(
            job["argv"],
            job["worker"],
            env=job["env"],
            ignore=job["ignored"],
            capture=self._tee,
            new_session=not job["tty"],
            linger_s=job["linger_s"],
            asked=job["asked"],
            started=self._started,
            stopped=self._stopped,
        )

    def begin(self, core: GroupCore) -> None:
        """The command is about to be asked for."""
        self._core = core

    def _not_of_the_tree(self) -> set[int]:
        return set() if self._keeper.ref is None else {self._keeper.ref.pid}

    def _not_to_be_watched(self) -> set[int]:
        """The command itself may have a name that is watched as one of its arguments."""
        return self._not_of_the_tree() | ({self.command.pid} if self.command.pid else set())

    def _started(self) -> None:
        if self._terminal is not None and self.command.pid is not None:
            self._terminal.lend(self.command.pid)
            # It may have asked for the terminal before it had it, and been stopped for that.
            self._signal(signal.SIGCONT, group=True)
        if self._watch is not None:
            self._watch.begin()

    # -- signals

    def _signal(self, number: int, *, group: bool) -> None:
        if self.command.alive:
            self._keeper.signal_child(self.command.spawn_id, number, group=group)

    def hear(self, arrival: Arrival) -> bool:
        """Pass on what is no request to stop; False for one that is."""
        from_terminal = arrival.sender == 0
        if arrival.number in _PASSED_ON:
            self._signal(arrival.number, group=from_terminal)
        elif arrival.number == signal.SIGTSTP:
            self._suspend()
        elif arrival.number == signal.SIGCONT:
            self._resume()
        else:
            return False
        return True

    def first_signal(self, arrival: Arrival) -> None:
        """The stop begins: from now on a death is no fault, and what is owned is looked at."""
        self.command.first_signal = arrival.number
        self.command.to_group = arrival.sender == 0  # a terminal means everybody in front
        if self._watch is not None:
            self._watch.end()
        self._finder.look_now(_PROVE_S)

    def _suspend(self) -> None:
        """Ctrl-Z: stop the command's group, then ourselves, for the shell to see.

        By SIGSTOP: the kernel does not stop a group for SIGTSTP that no shell looks after, as
        the command's in its own session is. Nothing happens where nobody could continue us.
        """
        from stopbath.lifecycle._terminal import under_job_control

        if under_job_control():
            self._signal(signal.SIGSTOP, group=True)
            stop_self()

    def _resume(self) -> None:
        if self._terminal is not None and self.command.pid is not None:
            self._terminal.lend(self.command.pid)
        self._signal(signal.SIGCONT, group=True)

    def _stopped(self) -> None:
        """The command has the terminal and was stopped: give the terminal to the shell."""
        from stopbath.lifecycle._terminal import under_job_control

        stat = None if self.command.pid is None else read_stat(self.command.pid)
        if self._terminal is None or stat is None or stat.state != "T":
            return  # it goes on already
        if under_job_control():
            self._terminal.take_back(reset=True)
            stop_self()
        self._resume()

    # -- the command's stderr

    def _await_reader(self) -> None:
        assert self._tee is not None
        self._sup.watch_writable(self._tee.out, self._reader_is_back)

    def _reader_is_back(self) -> None:
        assert self._tee is not None
        self._tee.pass_on()
        if not self._tee.holds:
            self._sup.unwatch_fd(self._tee.out)

    # -- faults, and the end

    def _fault(self, what: str) -> None:
        if self._core is not None and self._core.state is GroupState.READY:
            self.lost = True
            forward(f"stopbath: the command {what}: ending it\n".encode())
            self._core.fault(self.command, what)

    def end(self) -> dict[str, Any]:
        """Nothing of the tree is alive: clear up after it; gives the account of that."""
        if self._watch is not None:
            self._watch.end()
        swept = self._finder.finish(Deadline(time.monotonic() + _CLEAR_UP_S))
        if self._tee is not None:
            self._tee.finish(Deadline.after(_LAST_WORDS_S))
        if self._terminal is not None:
            end = self.command.exit
            self._terminal.take_back(reset=end is None or end.signal is not None)
        lines = [f"removed {it['kind']} {it['path']}, which it left" for it in swept["removed"]]
        lines += [
            f"{it['kind']} {it['path']}: born during the run, held by nobody; to remove such: "
            "--remove-inferred"
            for it in swept["inferred"]
        ]
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES:] = [f"… and {len(lines) - _MOST_LINES} more, in the report"]
        forward("".join(f"stopbath: {line}\n" for line in lines).encode())
        return swept


def _let_go(inherited: list[int]) -> None:
    """Close what is the command's alone.

    Whoever reads its stdout or writes to its stdin must see the end when the command closes
    them, not when we do.
    """
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1):
        os.dup2(nothing, fd)
    os.close(nothing)
    for fd in inherited:
        os.close(fd)
