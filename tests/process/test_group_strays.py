"""Whose a stray is: one group's unkillable leftover is no other group's business."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from observing import FREEZER, alive, frozen, wait_until
from stopbath.lifecycle import Deadline, Escalation, GroupState

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopbath.lifecycle import WorkerGroup

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.skipif(
        not (os.geteuid() == 0 and FREEZER.is_dir()), reason="no v1 freezer cgroup here"
    ),
]
QUICK = Escalation(drain_s=0.15, terminate_s=0.15, kill_s=0.4)


@pytest.mark.parametrize(
    ("which", "erased"), [("helper", False), ("stray", False), ("stray", True)]
)
def test_an_unkillable_stray_is_told_of_by_its_own_group_alone(
    group_of: Callable[..., WorkerGroup], which: str, *, erased: bool
) -> None:
    """By session, by environment, or because nobody else was dead; the keeper is shared."""
    worker = ("leaves_strays", {"kwargs": {"erased": erased}})
    one, two = (group_of(worker, escalation=QUICK) for _ in range(2))
    assert one._supervisor is two._supervisor
    pid = one.workers[0].info[which]
    with frozen(pid):
        report = one.shutdown(Deadline.after(1))
        assert [it.pid for it in report.survivors] == [pid]
        assert one.state is GroupState.SURVIVED
        began = time.monotonic()
        report = two.shutdown(Deadline.after(5))
        assert time.monotonic() - began < 1.0
        assert two.state is GroupState.STOPPED
        assert report.survivors == ()
        info = two.workers[0].info
        assert {it["pid"] for it in report.strays} == {info["helper"], info["stray"]}
    wait_until(lambda: one.state is GroupState.STOPPED, Deadline.after(5))
    assert one.survivors == ()


def test_a_stray_that_outlives_its_keeper_holds_up_no_stop(
    group_of: Callable[..., WorkerGroup],
) -> None:
    """Deadline + 100 ms, though nothing can end it; it got its SIGKILL, and goes once it can."""
    group = group_of("leaves_strays", escalation=QUICK)
    pid = group.workers[0].info["stray"]
    assert group._supervisor is not None
    keeper = group._supervisor.keeper.ref
    assert keeper is not None
    with frozen(pid):
        keeper.send(signal.SIGKILL)
        wait_until(lambda: group.state is GroupState.STOPPED, Deadline.after(5))
        deadline = Deadline.after(0.2)
        group.shutdown(deadline)
        assert time.monotonic() - deadline.at_s < 0.1
        assert alive(pid)
    wait_until(lambda: not alive(pid), Deadline.after(5))
    assert group_of("obedient").shutdown().clean  # its start removes the record
