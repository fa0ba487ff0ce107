"""The tables: every state can be left, and whatever happens ends where it must."""

# ruff: noqa: D102  (a rule's name says what happens)

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stopbath.lifecycle import GroupState, IllegalTransition, WorkerState
from stopbath.lifecycle._state import (
    GROUP_TRANSITIONS,
    TRANSITIONS,
    GroupEvent,
    WorkerEvent,
    next_state,
)

W, E, G = WorkerState, WorkerEvent, GroupState


def reachable(table: dict, start: object) -> set:
    seen, todo = {start}, deque([start])
    while todo:
        state = todo.popleft()
        for (source, _), target in table.items():
            if source is state and target not in seen:
                seen.add(target)
                todo.append(target)
    return seen


def test_every_worker_state_is_reached_and_leads_to_gone() -> None:
    assert reachable(TRANSITIONS, W.CREATED) == set(W)
    for state in W:
        assert W.GONE in reachable(TRANSITIONS, state)


def test_every_group_state_is_reached_and_leads_to_stopped() -> None:
    assert reachable(GROUP_TRANSITIONS, G.NEW) == set(G)
    for state in G:
        assert G.STOPPED in reachable(GROUP_TRANSITIONS, state)


def test_a_stop_has_a_row_in_every_state() -> None:
    assert all((state, E.STOP) in TRANSITIONS for state in W)
    assert all((state, GroupEvent.STOP) in GROUP_TRANSITIONS for state in G)


@pytest.mark.parametrize("state", [W.STARTING, W.READY, W.STOPPING, W.SURVIVED])
def test_whatever_runs_can_end(state: WorkerState) -> None:
    assert TRANSITIONS[state, E.EXITED] is W.EXITED


@pytest.mark.parametrize("state", [W.SPAWNING, W.STOPPING, W.EXITED])
def test_whatever_a_stop_can_find_can_outlive_it(state: WorkerState) -> None:
    assert (state, E.OUTLIVED) in TRANSITIONS


@pytest.mark.parametrize("state", [W.SPAWNING, W.STOPPING, W.SURVIVED])
def test_a_pid_that_comes_late_is_taken(state: WorkerState) -> None:
    """The keeper may be slow; what it has spawned is never refused."""
    assert (state, E.SPAWNED) in TRANSITIONS


def test_a_worker_becomes_ready_once() -> None:
    with pytest.raises(IllegalTransition, match="w0: 'ready' cannot happen while ready") as caught:
        next_state(TRANSITIONS, "w0", W.READY, E.READY)
    assert (caught.value.who, caught.value.state, caught.value.event) == ("w0", "ready", "ready")


class WorkerMachine(RuleBasedStateMachine):
    """Any order of events a worker can meet: the dead stay dead, nobody becomes ready twice."""

    state = W.CREATED
    was_ready = False

    @rule(event=st.sampled_from(WorkerEvent))
    def happens(self, event: WorkerEvent) -> None:
        before = self.state
        try:
            self.state = next_state(TRANSITIONS, "w", before, event)
        except IllegalTransition:
            return
        if before in {W.EXITED, W.GONE}:
            assert self.state in {W.EXITED, W.GONE}
        if self.state is W.READY and before is not W.READY:
            assert not self.was_ready
            self.was_ready = True
        if event is E.STOP:
            assert self.state not in {W.STARTING, W.READY}

    @invariant()
    def it_can_still_end(self) -> None:
        assert W.GONE in reachable(TRANSITIONS, self.state)


TestWorker = WorkerMachine.TestCase
TestWorker.settings = settings(max_examples=50, deadline=None)
