"""The guardian at work: the signals that arrive, the outer deadline, the account at the end.

It is a supervisor of one process, on the main thread of an interpreter that runs nothing else.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import time
from typing import TYPE_CHECKING, Any

from stopbath.lifecycle._account import merge, write_report
from stopbath.lifecycle._core import GroupCore, Policy
from stopbath.lifecycle._deadline import Deadline
from stopbath.lifecycle._errors import Exit, signal_name
from stopbath.lifecycle._escalation import Action, Escalation
from stopbath.lifecycle._evidence import survivor_of
from stopbath.lifecycle._exitcode import Ending, run_exit_code, serve_exit_code
from stopbath.lifecycle._process import (
    STOP_SIGNALS,
    ProcessRef,
    SignalQueue,
    catches,
    children,
    peek_exit,
    read_stat,
    reap,
    reap_pid,
)
from stopbath.lifecycle._report import render
from stopbath.lifecycle._spawn import Gone, KeeperClient, Spawned, WorkerExited
from stopbath.lifecycle._state import GroupState
from stopbath.lifecycle._supervisor import Supervisor
from stopbath.lifecycle._words import forward

if TYPE_CHECKING:
    from stopbath.lifecycle._containment import RunCgroup
    from stopbath.lifecycle._ledger import DeviceLedger
    from stopbath.lifecycle._member import Member
    from stopbath.lifecycle._process import Arrival
    from stopbath.lifecycle._registry import Record
    from stopbath.lifecycle._running import Running
    from stopbath.lifecycle._spawn import Event

__all__ = ["Guardian"]

_STAGES = (Action.DRAIN, Action.SIGTERM, Action.SIGKILL)
_DUMP_S = 0.1  # for the stacks, before the SIGTERM that ends whoever would write them
_STAYS_S = 0.1  # to see that a keeper does stay
_LEAVE_S = 2.0  # for the keeper to leave, and for what a dead keeper left to be ended


class Guardian:
    """One run: its keeper, its one process, the signals that arrive, the account at the end."""

    def __init__(
        self,
        job: dict[str, Any],
        keeper: KeeperClient,
        signals: SignalQueue,
        record: Record,
        cgroup: RunCgroup,
    ) -> None:
        self._record, self._cgroup = record, cgroup
        self._keeper_lost = False  # before the stop was over
        self._swept: dict[str, Any] | None = None
        self._job = job
        self._keeper = keeper
        self._queue = signals
        self._signals: list[int] = []
        self._asked_by = ""
        self._foreign: dict[int, dict[str, Any]] = {}  # workers of our worker, by pid
        self._foreign_strays: list[dict[str, Any]] = []
        self._sup = Supervisor(keeper)
        self._sup.on_foreign = self._note
        self._ledger: DeviceLedger | None = None
        self._devices: tuple[list[dict[str, Any]], str] = ([], "")
        self._running: Running | None = None
        if job["kind"] == "run":
            from stopbath.lifecycle._running import Running

            self._running = Running(job, keeper, self._sup, record)
            self._main: Member = self._running.command
        else:
            self._main = _server(job)
        self._core = GroupCore(
            job["name"],
            [self._main],
            escalation=Escalation(*job["graces_s"]),
            policy=Policy.ONE_FOR_ALL,
            start_s=math.inf,
            start_cap_s=math.inf,
        )

    def run(self) -> int:
        """Start the process, hand on what arrives, and leave with the run's exit code."""
        if self._running is not None:
            self._running.begin(self._core)
        self._sup.watch_fd(self._queue.fileno(), self._on_signals)
        self._sup.add(self._core)
        self._look_at_devices()
        self._core.when_over(self._sup.leave)
        self._sup.run()
        self._keeper_lost = self._keeper.channel.eof
        self._hear_of_the_rest(Deadline.after(_LEAVE_S))
        if not self._keeper.channel.eof:
            self._clear_up()  # before the keeper does it and forgets
        # One that keeps what nothing can end stays with it, and is not waited for.
        stays = self._core.state is GroupState.SURVIVED or any(self._untold())
        self._keeper.close(Deadline.after(_STAYS_S if stays else _LEAVE_S))
        self._cgroup.kill()  # what a keeper that was killed can no longer do
        if self._ledger is not None:
            self._ledger.cut()
        self._end_adopted(Deadline.after(_LEAVE_S))
        self._clear_up()
        if self._ledger is not None:
            self._devices = self._ledger.settle(self._ours(), self._queue.fileno(), self._hurried)
        if self._cgroup.remove() and not children():
            self._record.remove()
        return self._account()

    def _clear_up(self) -> None:
        if self._running is not None and self._swept is None:
            self._swept = self._running.end()

    # -- device memory

    def _look_at_devices(self) -> None:
        if self._job.get("ledger"):
            from stopbath.lifecycle._ledger import DeviceLedger

            self._ledger = DeviceLedger(self._job["ledger"], self._sup)
            self._ledger.begin()

    def _ours(self) -> set[int]:
        strays = [*self._foreign_strays, *(self._core.report.strays if self._core.report else ())]
        return {self._main.pid or 0, *self._foreign, *(it["pid"] for it in strays)}

    def _hurried(self) -> bool:
        return any(arrival.number in STOP_SIGNALS for arrival in self._queue.read())

    # -- signals

    def _on_signals(self) -> None:
        for arrival in self._queue.read():
            if arrival.number == signal.SIGCHLD:
                self._reap_adopted()
            elif self._running is None or not self._running.hear(arrival):
                self._on_stop_signal(arrival)

    def _on_stop_signal(self, arrival: Arrival) -> None:
        """First: drain. Second: stop now. Third: kill now. More: harmless."""
        self._signals.append(arrival.number)
        count = len(self._signals)
        if count == 1:
            self._asked_by = signal_name(arrival.number)
            if self._running is not None:
                self._running.first_signal(arrival)
        early = arrival.number == signal.SIGQUIT and self._job["kind"] == "serve"
        stage = min(count - 1 + early, len(_STAGES) - 1)
        if self._job["kind"] == "serve" and count <= len(_STAGES):
            words = ("stopping", "stopping now", "killing")[stage]
            hint = (" (again: stop now)", " (again: kill)", "")[stage]
            forward(f"stopbath: {signal_name(arrival.number)}: {words}{hint}\n".encode())
        action = _STAGES[stage]
        if early and action < Action.SIGKILL:
            self._dump_stacks()
            later = time.monotonic() + _DUMP_S
            self._sup.call_at(later, lambda: self._core.stop(action, math.inf, self._asked_by))
        else:
            self._core.stop(action, math.inf, self._asked_by)

    def _dump_stacks(self) -> None:
        """Have the server and its ranks write their stacks; who cannot would die of the signal."""
        living = [(it["pid"], it["start"]) for it in self._untold()]
        main = self._main.ref
        if main is not None:
            living.append((main.pid, main.start))
        for pid, start in living:
            with contextlib.suppress(ProcessLookupError):
                ref = ProcessRef.open(pid, start)
                if catches(ref, signal.SIGQUIT):
                    ref.send(signal.SIGQUIT)
                ref.close()

    # -- what is not ours by asking, but ours to account for

    def _note(self, event: Event) -> None:
        if isinstance(event, Spawned):
            pid, start = event.ref.pid, event.ref.start
            self._foreign[pid] = {"name": event.name, "pid": pid, "start": start, "exit": None}
        elif isinstance(event, (WorkerExited, Gone)) and event.pid in self._foreign:
            self._foreign[event.pid]["exit"] = dict(event.exit._asdict())
        if isinstance(event, Gone):
            self._foreign_strays += event.strays

    def _reap_adopted(self) -> None:
        """Reap zombies that came to us: as PID 1, or because the keeper is dead."""
        keeper = self._keeper.ref
        awaited = {keeper and keeper.pid, self._main.pid, *self._foreign}
        for pid in children():
            stat = read_stat(pid)
            if pid not in awaited and stat is not None and stat.state == "Z":
                reap_pid(pid)

    def _end_adopted(self, by: Deadline) -> None:
        """End whatever came to us because the keeper was killed, in passes, until none is new."""
        keeper = self._keeper.ref  # not reaped: alive, with what it cannot end, and stays with it
        kept = set() if keeper is None else {keeper.pid}
        while (pids := set(children()) - kept) and not by.passed:
            for pid in pids:
                try:
                    ref = ProcessRef.open(pid)
                except ProcessLookupError:
                    continue
                if not ref.dead() and pid not in self._foreign:
                    self._foreign_strays.append({"pid": pid, "argv": "", "outcome": "killed"})
                ref.try_send(signal.SIGKILL)
                if ref.dead(wait_s=by.left_s()) and pid in self._foreign:
                    self._foreign[pid]["exit"] = dict((peek_exit(ref) or Exit())._asdict())
                reap(ref)
                ref.close()

    def _hear_of_the_rest(self, by: Deadline) -> None:
        """Wait for the keeper's word on the ranks that a dead server left it to end."""
        poll = select.poll()
        poll.register(self._keeper.channel, select.POLLIN)
        known = self._told_survivors()  # they have had their SIGKILL, and its grace
        while any(it["pid"] not in known for it in self._untold()):
            if self._keeper.channel.eof or not poll.poll(by.left_s() * 1000):
                return
            for event in self._keeper.events():
                self._note(event)

    def _untold(self) -> list[dict[str, Any]]:
        """Give the workers of our worker that nobody has seen end."""
        return [it for it in self._foreign.values() if it["exit"] is None]

    def _told_survivors(self) -> set[int]:
        """Give those that our worker itself could not end, by its own account."""
        groups = self._main.reports[-1]["groups"] if self._main.reports else ()
        return {survivor["pid"] for group in groups for survivor in group["survivors"]}

    def _outlived(self) -> list[dict[str, Any]]:
        """Name the workers of our worker that nobody has seen end and that are still there."""
        found = []
        for it in self._untold():
            stat = read_stat(it["pid"])
            if stat is not None and stat.start == it["start"]:
                survivor = survivor_of(it["pid"], it["name"], Action.SIGKILL.step)
                found.append(dict(survivor._asdict()))
        return found

    # -- the account

    def _lost(self) -> bool:
        if self._running is not None:
            return self._running.lost
        end = self._main.exit
        by_a_signal = end is not None and end.signal is not None
        return by_a_signal and self._main.ended_by in {None, Action.DRAIN}

    def _account(self) -> int:
        report = self._core.report
        assert report is not None, "a group that is over has an account"
        merged = merge(
            report.to_dict(),
            self._main.reports[-1] if self._main.reports else None,
            list(self._foreign.values()),
            self._foreign_strays,
            self._outlived(),
            run_id=self._job["run_id"],
            asked_by=self._asked_by,
        )
        ending = Ending(
            exit=self._main.exit or Exit(),
            asked=bool(self._signals),
            was_ready=self._core.was_ready,
            killed_by_us=self._main.ended_by is Action.SIGKILL,
            survivors=bool(merged["survivors"]) or self._core.state is GroupState.SURVIVED,
            signals=tuple(self._signals),
            spawn_errno=self._main.spawn_errno,
            lost=self._lost(),
            keeper_lost=self._keeper_lost,
        )
        serving = self._job["kind"] == "serve"
        merged["devices"], absent = self._devices
        if absent:
            merged["devices_absent"] = absent
        if any(it["proved"] for device in merged["devices"] for it in device["left"]):
            merged["clean"] = False
        merged["swept"] = {"runs": self._job["swept"], **(self._swept or {})}
        merged["exit_code"] = code = (serve_exit_code if serving else run_exit_code)(ending)
        if self._job["report"]:
            problem = write_report(self._job["report"], merged)
            if problem:
                forward(f"stopbath: the report could not be written: {problem}\n".encode())
        if self._main.spawn_errno:
            forward(
                f"stopbath: {self._job['argv'][0]}: {os.strerror(ending.spawn_errno)}\n".encode()
            )
        elif serving or not merged["clean"] or merged["strays"] or _held(merged["devices"]):
            forward("".join(f"stopbath: {line}\n" for line in render(merged)).encode())
        return code


def _held(devices: list[dict[str, Any]]) -> bool:
    return any(device["left"] for device in devices)


def _server(job: dict[str, Any]) -> Member:
    from stopbath.lifecycle._parent_death import PARENT_DEATH
    from stopbath.lifecycle._spec import WorkerSpec
    from stopbath.lifecycle._worker import Worker

    spec = WorkerSpec(
        job["target"],
        args=job["args"],
        name=job["worker"],
        path=job["path"],
        keeper_access=True,
        prefix=False,
        parent_death=job.get("parent_death", PARENT_DEATH),
    )
    return Worker(spec, spec.name, 0)
