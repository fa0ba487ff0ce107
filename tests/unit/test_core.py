"""One group's core, where no process is needed to show a guarantee."""

from __future__ import annotations

import socket

from stopbath.lifecycle import Escalation, Policy, Supervisor, WorkerSpec
from stopbath.lifecycle._core import GroupCore
from stopbath.lifecycle._spawn import KeeperClient


def test_who_waits_for_the_end_of_a_start_that_never_was_is_told() -> None:
    """With the keeper dead before anything was asked for, the wait ends all the same.

    A guardian whose keeper was killed at that instant hung for ever.
    """
    ours, theirs = socket.socketpair()
    theirs.close()
    sup = Supervisor(KeeperClient(ours, None))
    core = GroupCore(
        "g",
        [WorkerSpec("nowhere:main", name="rank0").member("rank0", 0)],
        escalation=Escalation(),
        policy=Policy.ONE_FOR_ALL,
        start_s=1.0,
        start_cap_s=1.0,
    )
    told: list[str] = []
    sup.add(core)
    core.when_over(lambda: told.append("over"))
    sup.close()
    assert core.over
    assert told == ["over"]
    assert core.cause is not None
    assert "keeper" in core.cause.what
