"""The table of pending calls: every future ends once, with the right thing."""

from __future__ import annotations

import math

import pytest

from stopbath.errors import DeadlinePassed, WorkerLost
from stopbath.executor._calls import CallTable
from stopbath.executor.base import RankOutcome
from stopbath.lifecycle import Deadline
from stopbath.messages import CANCELLED, PEER_FAILED

NEVER = Deadline.never()


def test_all_gives_one_outcome_per_rank_in_rank_order() -> None:
    table = CallTable(2)
    call = table.begin("all", NEVER, None)
    table.settle(call.id, RankOutcome(1, "b"))
    assert not call.future.done()
    table.settle(call.id, RankOutcome(0, "a"))
    assert [outcome.value for outcome in call.future.result(0)] == ["a", "b"]
    assert len(table) == 0


def test_first_ends_with_rank_0_alone() -> None:
    table = CallTable(2)
    call = table.begin("first", NEVER, None)
    table.settle(call.id, RankOutcome(1))
    assert not call.future.done()
    table.settle(call.id, RankOutcome(0, "a"))
    assert call.future.result(0) == [RankOutcome(0, "a")]


def test_first_tells_what_the_failing_rank_said() -> None:
    """Rank 0 only knows that a peer failed; the caller gets the peer's own words."""
    table = CallTable(2)
    call = table.begin("first", NEVER, None)
    table.settle(call.id, RankOutcome(0, error_kind=PEER_FAILED))
    assert not call.future.done()
    table.settle(call.id, RankOutcome(1, error_kind="OutOfMemoryError"))
    assert [outcome.error_kind for outcome in call.future.result(0)] == ["OutOfMemoryError"]


def test_a_late_or_double_reply_is_dropped() -> None:
    """Nothing is remembered of calls that are over, and an id never comes again."""
    table = CallTable(2)
    first = table.begin("all", Deadline.after(0), None)
    assert table.expire() == [first.id]
    assert isinstance(first.future.exception(0), DeadlinePassed)
    table.settle(first.id, RankOutcome(0, "late"))
    second = table.begin("all", NEVER, None)
    assert second.id > first.id
    table.settle(second.id, RankOutcome(0, "x"))
    table.settle(second.id, RankOutcome(0, "again"))
    assert not second.future.done()
    table.settle(second.id, RankOutcome(1, "y"))
    assert [outcome.value for outcome in second.future.result(0)] == ["x", "y"]
    assert len(table) == 0


def test_ranks_that_gave_up_at_the_deadline_are_no_cancel_of_the_caller() -> None:
    table = CallTable(1)
    call = table.begin("all", Deadline.after(0), None)
    table.settle(call.id, RankOutcome(0, error_kind=CANCELLED))
    assert isinstance(call.future.exception(0), DeadlinePassed)


def test_closing_ends_pending_and_later_calls_with_the_first_reason() -> None:
    table = CallTable(1)
    call = table.begin("all", NEVER, None)
    assert table.close(WorkerLost("rank0 died")) == [call.id]
    assert table.close(DeadlinePassed("too late")) == []
    late = table.begin("all", NEVER, None)
    for ended in (call, late):
        with pytest.raises(WorkerLost, match="rank0 died"):
            ended.future.result(0)


def test_the_earliest_deadline_is_the_next_one() -> None:
    table = CallTable(1)
    assert table.next_deadline() == math.inf
    table.begin("all", Deadline(20.0), None)
    table.begin("all", Deadline(10.0), None)
    assert table.next_deadline() == 10.0


def test_the_caller_cannot_end_a_future_under_the_table() -> None:
    """A cancelled future would make the pump's set_result raise."""
    table = CallTable(1)
    call = table.begin("all", NEVER, None)
    assert not call.future.cancel()
    table.settle(call.id, RankOutcome(0, 1))
    assert call.future.result(0)[0].value == 1


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_callback_that_raises_hurts_nobody(error: type[BaseException]) -> None:
    table = CallTable(1)
    call = table.begin("all", NEVER, lambda _step, _steps: 1 / 0)

    def explode(_future: object) -> None:
        raise error

    call.future.add_done_callback(explode)
    table.progress(call.id, 1, 2)
    table.settle(call.id, RankOutcome(0, "kept"))
    assert call.future.result(0)[0].value == "kept"
