"""The ordered steps of a stop, as data, and the pure decision what comes when."""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

__all__ = ["Action", "Escalation", "Schedule", "Step", "plan"]


class Action(enum.IntEnum):
    """What a step does to every worker; a later one is harsher."""

    DRAIN = 1  # asked over the control socket: finish what was accepted, then return
    SIGTERM = 2  # SIGTERM, then SIGCONT: a stopped process does not see it otherwise
    SIGKILL = 3

    @property
    def step(self) -> str:
        """The name used in reports."""
        return "drain" if self is Action.DRAIN else self.name


class Step(NamedTuple):
    """One step: what to do, and how long to wait for its effect (seconds)."""

    action: Action
    grace_s: float


class Escalation:
    """The steps of a stop with their graces in seconds; SIGKILL always comes last.

    The defaults (5, 2 and 2) stay together inside the 10 seconds of `docker stop`.
    """

    __slots__ = ("steps",)

    def __init__(self, drain_s: float = 5.0, terminate_s: float = 2.0, kill_s: float = 2.0) -> None:
        for name, grace in (("drain", drain_s), ("terminate", terminate_s), ("kill", kill_s)):
            if not math.isfinite(grace) or grace < 0:
                raise ValueError(f"{name} grace must be a number of seconds >= 0, not {grace!r}")
        self.steps = (
            Step(Action.DRAIN, drain_s),
            Step(Action.SIGTERM, terminate_s),
            Step(Action.SIGKILL, kill_s),
        )

    def with_drain(self, drain_s: float) -> Escalation:
        """Give the same steps with another grace for the first."""
        _, terminate, kill = self.steps
        return Escalation(drain_s, terminate.grace_s, kill.grace_s)

    @property
    def total_s(self) -> float:
        """What a stop may take when nobody ends by themselves."""
        return sum(step.grace_s for step in self.steps)

    def __repr__(self) -> str:
        graces = ", ".join(f"{step.action.step} {step.grace_s:g} s" for step in self.steps)
        return f"<Escalation {graces}>"


class Schedule(NamedTuple):
    """When each remaining step begins, and when the last one is over (monotonic seconds)."""

    begins: tuple[tuple[Action, float], ...]
    over_at: float

    def action_at(self, now: float) -> Action:
        """Give the step in force at `now`: the last one that has begun."""
        current = self.begins[0][0]
        for action, begin in self.begins:
            if begin <= now:
                current = action
        return current

    def next_change(self, now: float) -> float:
        """Give the moment after `now` at which something has to be done."""
        return min((begin for _, begin in self.begins if begin > now), default=self.over_at)

    def no_later_than(self, other: Schedule) -> Schedule:
        """Give this schedule with no step later than `other` has it."""
        known = dict(other.begins)
        begins = tuple(
            (action, min(begin, known.get(action, begin))) for action, begin in self.begins
        )
        return Schedule(begins, min(self.over_at, other.over_at))


def plan(
    escalation: Escalation,
    *,
    first: Action,
    now: float,
    deadline: float,
    spent_s: float = 0.0,
    kill_extra_s: float = 0.0,
) -> Schedule:
    """Lay the steps from `first` on between `now` and `deadline` (monotonic seconds).

    Enough time: every step keeps its grace. Too little: SIGKILL's share is kept at the end, up
    to half of what is left, and the earlier steps shrink in proportion. `spent_s` is what `first`
    has had already; `kill_extra_s` stretches the wait after SIGKILL (tearing down 1 GiB of
    resident memory can take 0.2 s). The deadline holds in every case.
    """
    graces = {step.action: step.grace_s for step in escalation.steps if step.action >= first}
    graces[first] = max(0.0, graces[first] - spent_s)
    graces[Action.SIGKILL] += kill_extra_s
    left = max(0.0, deadline - now)
    if sum(graces.values()) > left:
        earlier = sum(grace for action, grace in graces.items() if action < Action.SIGKILL)
        kill = min(graces[Action.SIGKILL], left / 2 if earlier else left)
        shrink = (left - kill) / earlier if earlier else 0.0
        graces = {
            action: kill if action is Action.SIGKILL else grace * min(1.0, shrink)
            for action, grace in graces.items()
        }
    begins, at = [], now
    for action, grace in sorted(graces.items()):
        begins.append((action, at))
        at += grace
    return Schedule(tuple(begins), min(at, max(deadline, now)))
