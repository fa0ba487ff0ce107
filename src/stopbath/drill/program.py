"""The program of the library face: a worker group in a process that can be hit from outside.

`python -m stopbath.drill.program JSON`. It obeys lines on stdin and tells what happens; what a
scenario needs of the host itself (a loop, threads, a fork) is an act of `acts`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from stopbath.drill import habits
from stopbath.lifecycle import Deadline, Escalation, Policy, StartupError, WorkerGroup, WorkerSpec

__all__ = ["Program", "main"]

_LEAVES_S, _LOOK_EVERY_S = 1.0, 0.002


def _held() -> list[str]:
    """Name what this process holds: descriptors and threads."""
    found = [f"thread {name}" for name in os.listdir("/proc/self/task")]  # noqa: PTH208
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            found.append(f"fd {name} {os.readlink(f'/proc/self/fd/{name}')}")  # noqa: PTH115
        except OSError:  # the listing's own
            continue
    return found


class Program:
    """The group that a scenario asked for, and what is done with it."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked
        self._before = _held()
        self.group = self.make()

    def make(self, name: str = "drill") -> WorkerGroup:
        """Make the group; `fields` replace those of what was asked."""
        asked = self.asked
        specs = [
            WorkerSpec("stopbath.drill.workers:main", args=tuple(names), name=f"w{i}")
            for i, names in enumerate(asked["workers"])
        ]
        return WorkerGroup(
            name,
            specs,
            escalation=Escalation(*asked["graces"]),
            policy=Policy(asked["policy"]),
            start_s=asked["start_s"],
            start_cap_s=asked["start_cap_s"],
        )

    def start(self) -> bool:
        """Start, and tell how that went; whether the group is ready."""
        self.group.on_failure(
            lambda cause: habits.tell(
                who="cause",
                at=time.monotonic(),
                text=str(cause),
                worker=cause.worker,
                signal=cause.exit.signal if cause.exit else None,
                code=cause.exit.code if cause.exit else None,
                last=list(cause.last_stderr),
            )
        )
        began = time.monotonic()
        self.group.start()
        habits.tell(who="started")
        try:
            self.group.wait_ready(Deadline.after(60))
        except StartupError as error:
            habits.tell(who="start failed", took=time.monotonic() - began, text=str(error))
            self.tell_report()
            return False
        habits.tell(who="up", took=time.monotonic() - began)
        return True

    def obey(self) -> None:
        """Do what the lines on stdin say, until they end."""
        for line in sys.stdin:
            word, *values = line.split()
            if word == "shutdown":
                self.shutdown(float(values[0]) if values else None)
            elif word == "release":
                self.release(float(values[0]))
            elif word == "begin":
                threading.Thread(target=self.shutdown, args=(None,), daemon=True).start()
            elif word == "look":
                views = {view.name: [view.pid, view.state.value] for view in self.group.workers}
                habits.tell(who="look", workers=views, state=self.group.state.value)
            elif word == "exit":
                return

    def shutdown(self, within_s: float | None) -> None:
        """Stop, and tell the report, how late it came and what is held afterwards."""
        deadline = None if within_s is None else Deadline.after(within_s)
        habits.tell(who="stopping", at=time.monotonic())
        interrupts = 0
        while True:
            try:
                self.group.shutdown(deadline)
                break
            except KeyboardInterrupt:
                interrupts += 1
        late = 0.0 if deadline is None else time.monotonic() - deadline.at_s
        habits.tell(who="stopped", late=late, interrupts=interrupts)
        self.tell_report()

    def release(self, within_s: float) -> None:
        """Wait until the devices have back what the workers held, and tell who has not given it."""
        from stopbath.devices import open_ledger, wait_released

        report = self.group.report
        pids = {worker.pid for worker in report.workers if worker.pid} if report else set()
        ledger = open_ledger()
        try:
            found = wait_released(ledger, pids, Deadline.after(within_s))
        finally:
            ledger.close()
        left = [claim.pid for claim in found.left]
        habits.tell(who="released", took=found.took_s, left=left, of=sorted(pids))

    def _held_too_much(self) -> list[str]:
        """Name what is held now and was not before.

        A thread that Python has joined is out of Python, and a moment later out of the kernel.
        """
        by = Deadline.after(_LEAVES_S)
        while True:
            more = sorted(set(_held()) - set(self._before))
            known = {f"thread {it.native_id}" for it in threading.enumerate()}
            ending = [it for it in more if it.startswith("thread") and it not in known]
            if by.passed or not ending:
                return more
            time.sleep(_LOOK_EVERY_S)  # only /proc shows it

    def tell_report(self) -> None:
        """Tell the account, and what this process holds that it did not before."""
        report = self.group.report
        more = self._held_too_much()
        survivors = len(self.group.survivors)
        if not survivors and more and self.group.cause is not None:
            more = [it for it in more if not it.startswith("thread")]  # a callback's, just ending
        habits.tell(
            who="report", report=report and report.to_dict(), held=[] if survivors else more
        )


def main(argv: list[str]) -> None:
    """Play the act that was asked for."""
    asked = json.loads(argv[0])
    program = Program(asked)
    if asked["act"] == "obey":
        program.start()
        program.obey()
    else:
        from stopbath.drill import acts

        problems = getattr(acts, asked["act"])(program)
        habits.tell(who="act", problems=problems)


if __name__ == "__main__":
    main(sys.argv[1:])
