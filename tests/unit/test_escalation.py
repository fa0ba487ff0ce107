"""The plan of a stop: pure, so its promises hold for every number."""

# ruff: noqa: D102  (a rule's name says what happens)

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stopbath.lifecycle import Action, Escalation
from stopbath.lifecycle._escalation import Schedule, plan
from stopbath.lifecycle._stop import SETTLE_S, Stop

graces = st.floats(0, 1e4)
escalations = st.builds(Escalation, graces, graces, graces)
actions = st.sampled_from(Action)
nows = st.floats(0, 1e6)
lengths = st.one_of(st.floats(-10, 1e5), st.just(math.inf))
EPSILON = 1e-6


@st.composite
def plans(draw: st.DrawFn) -> tuple[Schedule, float, float]:
    now = draw(nows)
    deadline = now + draw(lengths)
    schedule = plan(
        draw(escalations),
        first=draw(actions),
        now=now,
        deadline=deadline,
        spent_s=draw(graces),
        kill_extra_s=draw(st.floats(0, 100)),
    )
    return schedule, now, deadline


@given(plans())
def test_steps_come_in_order_and_sigkill_is_the_last(
    planned: tuple[Schedule, float, float],
) -> None:
    schedule, now, _ = planned
    steps = [action for action, _ in schedule.begins]
    begins = [begin for _, begin in schedule.begins]
    assert steps == sorted(steps)
    assert steps[-1] is Action.SIGKILL
    assert begins == sorted(begins)
    assert begins[0] == now
    assert begins[-1] <= schedule.over_at + EPSILON


@given(plans())
def test_the_deadline_holds(planned: tuple[Schedule, float, float]) -> None:
    schedule, now, deadline = planned
    assert schedule.over_at <= max(deadline, now)


@given(escalations, nows, st.floats(0.01, 1e5), actions)
def test_sigkill_always_has_a_share(
    escalation: Escalation, now: float, length: float, first: Action
) -> None:
    """Its whole grace, or at least half of what there is."""
    schedule = plan(escalation, first=first, now=now, deadline=now + length)
    share = schedule.over_at - dict(schedule.begins)[Action.SIGKILL]
    assert share >= min(escalation.steps[-1].grace_s, length / 2) - EPSILON


@given(escalations, nows, actions)
def test_with_enough_time_every_step_keeps_its_grace(
    escalation: Escalation, now: float, first: Action
) -> None:
    schedule = plan(escalation, first=first, now=now, deadline=math.inf)
    ends = [begin for _, begin in schedule.begins[1:]] + [schedule.over_at]
    given_s = [end - begin for (_, begin), end in zip(schedule.begins, ends, strict=True)]
    wanted = [step.grace_s for step in escalation.steps if step.action >= first]
    assert given_s == pytest.approx(wanted, abs=EPSILON)


@given(plans(), st.floats(0, 1e5))
def test_the_step_in_force_follows_from_the_time(
    planned: tuple[Schedule, float, float], later: float
) -> None:
    schedule, now, _ = planned
    at = now + later
    action = schedule.action_at(at)
    assert dict(schedule.begins)[action] <= at
    assert schedule.next_change(at) > at or schedule.next_change(at) == schedule.over_at


@pytest.mark.parametrize("bad", [-1, -1e-9, math.nan, math.inf])
@pytest.mark.parametrize("which", ["drain_s", "terminate_s", "kill_s"])
def test_a_grace_is_a_number_of_seconds(which: str, bad: float) -> None:
    with pytest.raises(ValueError, match="grace"):
        Escalation(**{which: bad})


def test_the_defaults_fit_into_the_ten_seconds_of_docker_stop() -> None:
    assert Escalation().total_s < 10


def test_its_repr_states_the_steps() -> None:
    assert repr(Escalation(1, 2, 3)) == "<Escalation drain 1 s, SIGTERM 2 s, SIGKILL 3 s>"


def test_shortening_a_shortened_stop_delays_no_step() -> None:
    """Shrinking in proportion again and again would push SIGTERM back."""
    stop = Stop(
        Escalation(10, 2, 2),
        first=Action.DRAIN,
        now=0.0,
        deadline=math.inf,
        asked_by="a test",
        kill_extra_s=0,
    )
    assert stop.due(0.0) is Action.DRAIN
    stop.shorten(Action.DRAIN, 10.0, 4.0)
    before = dict(stop._schedule.begins)
    assert before[Action.SIGTERM] == pytest.approx(7)
    stop.shorten(Action.DRAIN, 9.999, 6.0)
    after = dict(stop._schedule.begins)
    assert after[Action.SIGTERM] <= before[Action.SIGTERM]
    assert after[Action.SIGKILL] <= before[Action.SIGKILL]


@pytest.mark.parametrize("when", ["before the first step", "during the drain"])
def test_an_announced_budget_stretches_the_drain_and_nothing_else(when: str) -> None:
    stop = Stop(
        Escalation(1, 2, 3),
        first=Action.DRAIN,
        now=0.0,
        deadline=math.inf,
        asked_by="a test",
        kill_extra_s=0,
    )
    if when == "during the drain":
        assert stop.due(0.0) is Action.DRAIN
    stop.wait_longer(10)
    stop.wait_longer(4)  # the longest counts
    assert stop._schedule.begins == ((Action.DRAIN, 0), (Action.SIGTERM, 10), (Action.SIGKILL, 12))


class StopMachine(RuleBasedStateMachine):
    """A stop in progress that callers join, at any time, with any wish.

    Its promises: no caller makes anything later, every step is applied once and in order, it is
    over by the earliest deadline (and what SIGKILL needs to take effect).
    """

    @initialize(escalation=escalations, first=actions, length=lengths)
    def begin(self, escalation: Escalation, first: Action, length: float) -> None:
        self.now = 1000.0
        self.deadline = self.now + length
        self.applied: list[Action] = []
        self.stop = Stop(
            escalation,
            first=first,
            now=self.now,
            deadline=self.deadline,
            asked_by="a test",
            kill_extra_s=0,
        )
        self.look()

    def look(self) -> None:
        action = self.stop.due(self.now)
        if action is not None:
            self.applied.append(action)

    def plan_of(self) -> dict[Action, float]:
        return dict(self.stop._schedule.begins)

    @rule(seconds=st.floats(0, 2000))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.look()

    @rule(seconds=st.floats(0, 1))
    def the_next_change_comes(self, seconds: float) -> None:
        self.now = max(self.now, self.stop.next_change(self.now)) + seconds
        self.look()

    @rule(fraction=st.floats(0.9, 1))
    def somebody_joins_with_a_little_less_time(self, fraction: float) -> None:
        left = self.stop._schedule.over_at - self.now
        self.somebody_joins(Action.DRAIN, max(0.0, left) * fraction)

    @rule(first=actions, length=lengths)
    def somebody_joins(self, first: Action, length: float) -> None:
        before, over_at = self.plan_of(), self.stop._schedule.over_at
        self.deadline = min(self.deadline, self.now + length)
        self.stop.shorten(first, self.now + length, self.now)
        for action, begin in self.plan_of().items():
            assert begin <= before[action] + EPSILON or begin <= self.now
        assert self.stop._schedule.over_at <= max(over_at, self.now)
        assert self.stop._schedule.action_at(self.now) >= first
        self.look()

    @precondition(lambda self: Action.SIGKILL not in self.applied)
    @rule(budget_s=st.floats(0, 100))
    def a_worker_asks_for_time(self, budget_s: float) -> None:
        self.stop.wait_longer(budget_s)
        self.look()

    @invariant()
    def steps_are_applied_once_and_in_order(self) -> None:
        assert self.applied == sorted(set(self.applied))

    @invariant()
    def it_is_over_by_the_deadline(self) -> None:
        if self.now > self.deadline:
            assert self.applied[-1] is Action.SIGKILL
        if self.now > self.deadline + SETTLE_S and Action.SIGKILL in self.applied:
            settled = self.now > self.stop._applied_at + SETTLE_S
            assert self.stop.over(self.now) or not settled


TestStop = StopMachine.TestCase
