"""The restart policy, without a clock."""

from __future__ import annotations

import pytest

from stopbath.engine.restarts import RestartPolicy


def test_tries_are_further_and_further_apart_and_then_there_are_none() -> None:
    """A crash loop ends in a terminal state."""
    policy = RestartPolicy(max_restarts=4, window_s=60.0)
    policy.ready(0.0)
    assert [policy.died(float(now)) for now in range(1, 7)] == [0.5, 1.0, 2.0, 4.0, None, None]


def test_only_a_healthy_spell_ends_a_row() -> None:
    """Minutes of loading between two crashes are no health; a minute of service is."""
    policy = RestartPolicy(max_restarts=2, window_s=60.0)
    policy.ready(0.0)
    assert policy.died(10.0) == 0.5
    assert policy.died(500.0) == 1.0  # a start that failed, after a long time
    assert policy.died(1000.0) is None
    policy = RestartPolicy(max_restarts=2, window_s=60.0)
    policy.ready(0.0)
    policy.died(1.0)
    policy.ready(2.0)
    policy.died(61.9)
    policy.ready(62.0)
    assert policy.died(122.0) == 0.5


def test_short_spells_do_not_add_up() -> None:
    policy = RestartPolicy(max_restarts=3, window_s=60.0)
    delays = []
    for now in (0.0, 100.0, 200.0, 300.0):
        policy.ready(now)
        delays.append(policy.died(now + 59.0))
    assert delays == [0.5, 1.0, 2.0, None]


@pytest.mark.parametrize("limit", [0, 1])
def test_the_limit_is_what_it_says(limit: int) -> None:
    policy = RestartPolicy(max_restarts=limit, window_s=1.0)
    assert sum(policy.died(0.0) is not None for _ in range(5)) == limit


def test_the_pause_has_a_bound() -> None:
    policy = RestartPolicy(max_restarts=10_000, window_s=1.0)
    delays = [policy.died(0.0) or 0.0 for _ in range(10_000)]
    assert max(delays) == delays[-1] == 30.0
