"""Ranks as threads, where no model is needed to show a guarantee."""

from __future__ import annotations

import pytest

from stopbath.executor._threads import ThreadGroup
from stopbath.lifecycle import (
    Deadline,
    Escalation,
    GroupState,
    StartupError,
    WorkerSpec,
    WorkerState,
)


def test_a_rank_that_has_ended_and_not_said_so_yet_is_a_start_that_fails() -> None:
    """Who waits may look between a rank's end and its word; it is told as any failed start."""
    spec = WorkerSpec("nowhere:main", name="rank0")
    group = ThreadGroup("replica0", [spec], escalation=Escalation(0, 0, 0), start_s=60.0)
    group.state, group.workers[0].state = GroupState.STARTING, WorkerState.GONE
    with pytest.raises(StartupError, match="rank0"):
        group.wait_ready(Deadline.after(0.05))
    assert group.state is GroupState.STOPPED
