"""The guardian: the outermost process of `serve` and `run`.

All outside signals arrive here and only here. It has the outer deadline (a hung server does not
hear anybody), writes the report and gives the exit code. It is a supervisor of one worker, on
the main thread of a process that runs nothing else. Run by path with `python -I -S`; what it
is to do comes as JSON in an anonymous file.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys

if __name__ == "__main__":  # run by path, without site: let the package be found beside it
    sys.path.insert(
        0,
        os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
    )

import math
from typing import TYPE_CHECKING, Any

from stopbath.lifecycle import _keeper
from stopbath.lifecycle._core import GroupCore, Policy
from stopbath.lifecycle._deadline import Deadline
from stopbath.lifecycle._errors import Exit, signal_name
from stopbath.lifecycle._escalation import Action, Escalation
from stopbath.lifecycle._exitcode import Ending, exit_code
from stopbath.lifecycle._member import forward
from stopbath.lifecycle._process import (
    ProcessRef,
    become_subreaper,
    children,
    peek_exit,
    read_stat,
    reap,
    reap_pid,
)
from stopbath.lifecycle._report import merge, render, write_report
from stopbath.lifecycle._spawn import Gone, KeeperClient, Spawned, WorkerExited
from stopbath.lifecycle._spec import WorkerSpec
from stopbath.lifecycle._state import GroupState
from stopbath.lifecycle._supervisor import Supervisor

if TYPE_CHECKING:
    from stopbath.lifecycle._spawn import Event

__all__ = ["Guardian", "main"]

_STAGES = (Action.DRAIN, Action.SIGTERM, Action.SIGKILL)
_LEAVE_S = 2.0  # for the keeper to leave, and for what a dead keeper left to be ended


class Guardian:
    """One run: its keeper, its one worker, the signals that arrive, the account at the end."""

    def __init__(self, job: dict[str, Any], keeper: KeeperClient, *, hup_ignored: bool) -> None:
        self._job = job
        self._keeper = keeper
        self._hup_ignored = hup_ignored
        self._signals: list[int] = []
        self._asked_by = "nobody"
        self._foreign: dict[int, dict[str, Any]] = {}  # workers of our worker, by pid
        self._foreign_strays: list[dict[str, Any]] = []
        self._sup = Supervisor(keeper)
        self._sup.on_foreign = self._note
        self._core = GroupCore(
            job["name"],
            [
                WorkerSpec(
                    job["target"],
                    args=job["args"],
                    name=job["worker"],
                    path=job["path"],
                    keeper_access=True,
                    prefix=False,
                )
            ],
            escalation=Escalation(*job["graces_s"]),
            policy=Policy.ONE_FOR_ALL,
            start_s=math.inf,
            start_cap_s=math.inf,
        )

    def run(self) -> int:
        """Start the worker, hand on what arrives, and leave with the run's exit code."""
        self._listen()
        self._sup.add(self._core)
        self._core.when_over(self._sup.leave)
        self._sup.run()
        self._hear_of_the_rest(Deadline.after(_LEAVE_S))
        self._keeper.close()
        self._end_adopted(Deadline.after(_LEAVE_S))
        return self._account()

    # -- signals

    def _listen(self) -> None:
        wake_in, wake_out = os.pipe()
        os.set_blocking(wake_in, False)
        os.set_blocking(wake_out, False)
        signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            if number is signal.SIGHUP and self._hup_ignored:
                continue  # nohup stays in force
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        self._sup.watch_fd(wake_in, lambda: self._on_signals(wake_in))
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _on_signals(self, wake_in: int) -> None:
        try:
            numbers = os.read(wake_in, 4096)
        except BlockingIOError:
            return
        for number in numbers:
            if number == signal.SIGCHLD:
                self._reap_adopted()
            else:
                self._on_signal(number)

    def _on_signal(self, number: int) -> None:
        """First: drain. Second: stop now. Third: kill now. More: harmless."""
        self._signals.append(number)
        stage = 1 if number == signal.SIGQUIT and len(self._signals) == 1 else 0
        stage = min(len(self._signals) - 1 + stage, len(_STAGES) - 1)
        if len(self._signals) <= len(_STAGES):
            words = ("stopping", "stopping now", "killing")[stage]
            hint = (" (again: stop now)", " (again: kill)", "")[stage]
            forward(f"stopbath: {signal_name(number)}: {words}{hint}\n".encode())
        if len(self._signals) == 1:
            self._asked_by = signal_name(number)
        self._core.stop(_STAGES[stage], math.inf, self._asked_by)

    # -- what is not ours by asking, but ours to account for

    def _note(self, event: Event) -> None:
        if isinstance(event, Spawned):
            self._foreign[event.ref.pid] = {"name": event.name, "pid": event.ref.pid, "exit": None}
        elif isinstance(event, (WorkerExited, Gone)) and event.pid in self._foreign:
            self._foreign[event.pid]["exit"] = dict(event.exit._asdict())
        if isinstance(event, Gone):
            self._foreign_strays += event.strays

    def _reap_adopted(self) -> None:
        """Reap zombies that came to us: as PID 1, or because the keeper is dead."""
        keeper = self._keeper.ref
        awaited = {keeper and keeper.pid, self._core.members[0].pid, *self._foreign}
        for pid in children():
            stat = read_stat(pid)
            if pid not in awaited and stat is not None and stat.state == "Z":
                reap_pid(pid)

    def _end_adopted(self, by: Deadline) -> None:
        """End whatever came to us because the keeper was killed, in passes, until none is new."""
        while (pids := children()) and not by.passed:
            for pid in pids:
                try:
                    ref = ProcessRef.open(pid)
                except ProcessLookupError:
                    continue
                if not ref.dead() and pid not in self._foreign:
                    self._foreign_strays.append({"pid": pid, "argv": "", "outcome": "killed"})
                ref.send(signal.SIGKILL)
                if ref.dead(wait_s=by.left_s()) and pid in self._foreign:
                    self._foreign[pid]["exit"] = dict((peek_exit(ref) or Exit())._asdict())
                reap(ref)
                ref.close()

    def _hear_of_the_rest(self, by: Deadline) -> None:
        """Wait for the keeper's word on the ranks that a dead server left it to end."""
        poll = select.poll()
        poll.register(self._keeper.channel, select.POLLIN)
        while any(it["exit"] is None for it in self._foreign.values()):
            if self._keeper.channel.eof or not poll.poll(by.left_s() * 1000):
                return
            for event in self._keeper.events():
                self._note(event)

    # -- the account

    def _account(self) -> int:
        report = self._core.report
        assert report is not None  # a group that is over has one
        member = self._core.members[0]
        merged = merge(
            report.to_dict(),
            member.reports[-1] if member.reports else None,
            list(self._foreign.values()),
            self._foreign_strays,
            run_id=self._job["run_id"],
            asked_by=self._asked_by,
        )
        ended = member.exit or Exit()
        merged["exit_code"] = code = exit_code(
            Ending(
                exit=ended,
                asked=bool(self._signals),
                was_ready=self._core.was_ready,
                killed_by_us=member.sent is Action.SIGKILL,
                survivors=bool(merged["survivors"]) or self._core.state is GroupState.SURVIVED,
                signals=tuple(self._signals),
            )
        )
        if self._job["report"]:
            problem = write_report(self._job["report"], merged)
            if problem:
                forward(f"stopbath: the report could not be written: {problem}\n".encode())
        lines = render(merged)
        forward("".join(f"stopbath: {line}\n" for line in lines).encode())
        return code


def _fork_keeper() -> KeeperClient:
    """Fork the keeper while this process is still small, single-threaded and owns nothing."""
    ours, theirs = socket.socketpair()
    me = os.getpid()
    stat = read_stat(me)
    assert stat is not None, "/proc is not mounted"
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            os.setsid()
            _keeper.run(theirs, me, stat.start)
        finally:
            os._exit(0)
    theirs.close()
    return KeeperClient(ours, ProcessRef.open(pid))


def main(argv: list[str]) -> None:
    """Entry of `python -I -S _guardian.py FD`, the descriptor of the job."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    hup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    with os.fdopen(int(argv[0]), "rb") as file:
        job = json.load(file)
    become_subreaper()
    code = Guardian(job, _fork_keeper(), hup_ignored=hup_ignored).run()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
