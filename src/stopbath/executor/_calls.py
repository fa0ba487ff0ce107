"""Calls under way: who still has to answer, by when, and what the caller gets in the end."""

from __future__ import annotations

import logging
import math
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal

import msgspec

from stopbath.errors import DeadlinePassed
from stopbath.executor.base import CallHandle, RankOutcome
from stopbath.messages import CANCELLED, PEER_FAILED, Failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopbath.lifecycle import Deadline
    from stopbath.messages import Reply

__all__ = ["CallTable", "outcome_of"]

_log = logging.getLogger("stopbath.executor")


class _Answer(Future[list[RankOutcome]]):
    """A future that nobody but the table can end."""

    def cancel(self) -> bool:
        """Refuse: a cancelled future could not be given its answer."""
        return False


class _Pending(msgspec.Struct):
    future: Future[list[RankOutcome]]
    expected: int
    wants: Literal["all", "first"]
    deadline: Deadline
    on_progress: Callable[[int, int], None] | None
    outcomes: dict[int, RankOutcome] = {}

    def note(self, outcome: RankOutcome) -> list[RankOutcome] | None:
        """Take one rank's outcome; give what the caller gets, or None while it is not all there."""
        if self.expected == 1:
            return [outcome]
        self.outcomes.setdefault(outcome.rank, outcome)
        everybody = len(self.outcomes) == self.expected
        if self.wants == "all":
            return [self.outcomes[rank] for rank in sorted(self.outcomes)] if everybody else None
        first = self.outcomes.get(0)
        if first is None:
            return None
        if first.error_kind != PEER_FAILED:
            return [first]
        # Rank 0 left because another rank failed; the caller should hear what that one says.
        return [self._whose_fault(first)] if everybody else None

    def _whose_fault(self, first: RankOutcome) -> RankOutcome:
        others = (o for o in self.outcomes.values() if not o.ok and o.error_kind != PEER_FAILED)
        return next(others, first)


class CallTable:
    """The pending calls of one executor; safe from any thread, holds no lock while it calls out.

    Ids rise and are never used twice, so a late reply finds nothing and is dropped, and nothing
    has to be remembered about calls that are over.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._last_id = 0
        self._closed: Exception | None = None

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def closed(self) -> bool:
        """Whether no call can begin any more."""
        return self._closed is not None

    def begin(
        self,
        wants: Literal["all", "first"],
        deadline: Deadline,
        on_progress: Callable[[int, int], None] | None,
    ) -> CallHandle:
        """Enter a call. Once the table is closed its future has ended with the reason."""
        future = _Answer()
        with self._lock:
            self._last_id += 1
            handle = CallHandle(self._last_id, future)
            closed = self._closed
            if closed is None:
                self._pending[handle.id] = _Pending(
                    future, self._ranks, wants, deadline, on_progress
                )
        if closed is not None:
            _end(future, closed)
        return handle

    def settle(self, call_id: int, outcome: RankOutcome) -> None:
        """Note one rank's outcome; a late one, or a second one, is dropped."""
        with self._lock:
            call = self._pending.get(call_id)
            if call is None:
                return
            result = call.note(outcome)
            if result is None:
                return
            del self._pending[call_id]
        if any(each.error_kind == CANCELLED for each in result) and call.deadline.passed:
            # The ranks know the deadline too, and gave up before this side had looked.
            _end(call.future, _too_late(call_id))
        else:
            _end(call.future, result)

    def progress(self, call_id: int, step: int, steps: int) -> None:
        """Pass a step on; what the callback raises is logged and swallowed."""
        call = self._pending.get(call_id)
        if call is None or call.on_progress is None:
            return
        try:
            call.on_progress(step, steps)
        except Exception:  # noqa: BLE001  (the caller's own affair, not the pump's)
            _log.exception("the progress callback of call %d raised", call_id)

    def fail(self, call_id: int, error: Exception) -> bool:
        """End one call with `error`; whether it was still pending."""
        with self._lock:
            call = self._pending.pop(call_id, None)
        if call is None:
            return False
        _end(call.future, error)
        return True

    def expire(self) -> list[int]:
        """End the calls whose deadline has passed; give their ids."""
        with self._lock:
            late = [(i, call) for i, call in self._pending.items() if call.deadline.passed]
            for call_id, _ in late:
                del self._pending[call_id]
        for call_id, call in late:
            _end(call.future, _too_late(call_id))
        return [call_id for call_id, _ in late]

    def next_deadline(self) -> float:
        """Give the monotonic second of the earliest deadline, infinity when there is none."""
        with self._lock:
            return min((call.deadline.at_s for call in self._pending.values()), default=math.inf)

    def close(self, error: Exception) -> list[int]:
        """End every pending call, and every later one, with `error`; the first reason stays.

        Gives the ids of the calls it ended.
        """
        with self._lock:
            self._closed = self._closed or error
            ended, self._pending = self._pending, {}
        for call in ended.values():
            _end(call.future, error)
        return list(ended)


def outcome_of(rank: int, message: Reply | Failure) -> RankOutcome:
    """Read what a rank says of a call that is over there."""
    if not isinstance(message, Failure):
        return RankOutcome(rank, message.value)
    return RankOutcome(
        rank,
        error_kind=message.kind,
        error_message=message.message,
        traceback=message.traceback,
    )


def _too_late(call_id: int) -> DeadlinePassed:
    return DeadlinePassed(f"call {call_id} took longer than its deadline")


def _end(future: Future[list[RankOutcome]], answer: list[RankOutcome] | Exception) -> None:
    """End a future; callbacks run here and may raise anything without hurting this thread."""
    try:
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
    except BaseException:  # noqa: BLE001  (SystemExit out of a callback must not end the pump)
        _log.warning("a done callback of a call raised", exc_info=True)
