"""The cycles of a soak, in a program of their own: `python -m stopbath.drill.soaked SEED N…`.

Writes one line of JSON for each cycle: what was left, how late the stop was, what went wrong.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from stopbath.drill.scene import pause
from stopbath.lifecycle import (
    Deadline,
    Escalation,
    GroupState,
    LifecycleError,
    Policy,
    ProcessRef,
    StartupError,
    WorkerGroup,
    WorkerSpec,
)
from stopbath.lifecycle._process import become_subreaper, read_stat, reap_pid

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Plan", "main", "plan_of"]

_HABITS = (
    *((),) * 4,
    *(("deaf",),) * 2,
    ("helper",),
    ("stray",),
    ("deaf", "stray"),
    ("raises at stop",),
    ("hangs in its handler",),
    ("raises at start",),
    ("killed at start",),
    ("hangs at start",),
)
_GAP_S = 0.03
_MARK = "STOPBATH_SOAK"


class Plan(NamedTuple):
    """The choices of one cycle; times in seconds after the start."""

    workers: tuple[tuple[str, ...], ...]
    policy: str
    graces: tuple[float, float, float]
    victims: tuple[str, ...]  # "keeper" or w0 …; the second is hit 30 ms after the first
    number: int  # the signal they get
    fault_s: float
    stop_s: float
    within_s: float  # the deadline of the stop
    callers: int  # threads that ask for it at once
    kills: bool  # whether somebody shortens it by kill()


def plan_of(seed: int, cycle: int) -> Plan:
    """Choose a cycle; the same for the same two numbers, on every machine."""
    rng = random.Random(f"{seed}:{cycle}")  # noqa: S311  (choices that a seed replays)
    count = rng.choice((1, 2, 2, 3, 4))
    workers = tuple(rng.choice(_HABITS) for _ in range(count))
    who = ["keeper", *(f"w{i}" for i in range(count))]
    victims = tuple(rng.sample(who, rng.choice((0, 1, 1, 2))))
    # Up to 3 s, most of them early: what starts is where windows are.
    fault_s = rng.choice((0.0, rng.uniform(0, 0.1), rng.uniform(0, 0.4), rng.uniform(0, 3)))
    return Plan(
        workers,
        rng.choice(("one_for_all", "one_for_all", "independent")),
        (rng.choice((0.0, 0.1, 0.3)), rng.choice((0.0, 0.1, 0.3)), 1.0),
        victims,
        int(rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP))),
        fault_s,
        min(fault_s + rng.choice((0.0, rng.uniform(0, 0.3))), 3.0),
        rng.choice((0.0, 0.2, 0.5, 1.5)),
        rng.choice((1, 1, 1, 4)),
        rng.random() < 0.15,  # noqa: PLR2004
    )


class _Cycle:
    """One cycle as it is played."""

    def __init__(self, number: int, plan: Plan) -> None:
        self.number, self.plan = number, plan
        self.late_s = 0.0
        self.problem = ""
        self._cookie = secrets.token_hex(6)
        self._group = WorkerGroup(
            f"soak{number}",
            [
                WorkerSpec(
                    "stopbath.drill.workers:main",
                    args=names,
                    name=f"w{i}",
                    env={_MARK: self._cookie},
                    prefix=False,
                )
                for i, names in enumerate(plan.workers)
            ],
            escalation=Escalation(*plan.graces),
            policy=Policy(plan.policy),
            start_s=20.0,
        )

    def play(self) -> dict[str, object]:
        """Start, hit, stop, look."""
        plan, began = self.plan, time.monotonic()
        self._group.start()
        pause(max(0.0, began + plan.fault_s - time.monotonic()))
        for i, victim in enumerate(plan.victims):
            if i:
                pause(_GAP_S)
            self._hit(victim)
        pause(max(0.0, began + plan.stop_s - time.monotonic()))
        self._stop()
        if self._group.state is not GroupState.STOPPED:
            # A deadline that was too short for a birth or a teardown: named, and taken up again.
            self._quietly(lambda: self._group.shutdown(Deadline.after(3.0)))
        left = self._left()
        return {
            "cycle": self.number,
            "left": left,
            "late_s": self.late_s,
            "problem": self.problem,
        }

    def _hit(self, victim: str) -> None:
        if victim == "keeper":
            supervisor = self._group._supervisor  # noqa: SLF001  (a fault comes from outside)
            ref = None if supervisor is None else supervisor.keeper.ref
            if ref is not None:
                ref.send(self.plan.number)
            return
        pid = self._group.workers[int(victim[1:])].pid
        if pid is None:
            return
        try:
            ref = ProcessRef.open(pid)
        except ProcessLookupError:
            return
        if _marked(pid, self._cookie):  # its number may be another's by now
            ref.send(self.plan.number)
        ref.close()

    def _stop(self) -> None:
        """Ask for the stop, from several threads at once if the plan says so."""
        storm = [threading.Thread(target=self._ask) for _ in range(self.plan.callers)]
        for thread in storm:
            thread.start()
        if self.plan.kills:
            self._quietly(self._group.kill)
        for thread in storm:
            thread.join()

    def _ask(self) -> None:
        deadline = Deadline.after(self.plan.within_s)
        self._quietly(lambda: self._group.shutdown(deadline))
        self.late_s = max(self.late_s, time.monotonic() - deadline.at_s)

    def _quietly(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (StartupError, LifecycleError) as error:
            self.problem = f"{type(error).__name__}: {error}"

    def _left(self) -> list[str]:
        """What is there after the stop, and half a second for the keeper to leave."""
        by = time.monotonic() + 2.0
        while True:
            found = [f"{pid} {word}" for pid, word in _processes(self._cookie)]
            if not found or time.monotonic() > by:
                return found
            pause(0.01)


def _marked(pid: int, cookie: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
            return f"{_MARK}={cookie}".encode() in file.read()
    except OSError:
        return False


def _processes(cookie: str) -> list[tuple[int, str]]:
    """What a cycle has started: by its cookie, and by descent from this subreaper."""
    me, found = os.getpid(), []
    for name in os.listdir("/proc"):  # noqa: PTH208
        stat = read_stat(name) if name.isdigit() else None
        if stat is None:
            continue
        pid = int(name)
        if stat.ppid == me and stat.state == "Z":
            reap_pid(pid)
        elif stat.ppid == me or _marked(pid, cookie):
            found.append((pid, stat.state))
    return found


def main(argv: list[str]) -> None:
    """Play the cycles with these numbers."""
    become_subreaper()
    seed, *numbers = map(int, argv)
    for number in numbers:
        facts = _Cycle(number, plan_of(seed, number)).play()
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
