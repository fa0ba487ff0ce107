"""The life of a request, as a table. No I/O and no clock here."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from stopbath.lifecycle import IllegalTransition

__all__ = ["ENDED", "REQUEST_TRANSITIONS", "Request", "RequestEvent", "RequestState"]


class RequestState(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"  # accepted, in the queue
    RUNNING = "running"  # a replica works on it
    PREEMPTED = "preempted"  # taken from its place unfinished; on hold, or to be begun anew
    COMPLETED = "completed"
    ABORTED = "aborted"  # its client left or deleted it
    ERROR = "error"  # a fault, a deadline or a stop ended it


class RequestEvent(enum.Enum):
    """What can happen to a request."""

    DISPATCH = "dispatch"
    PREEMPT = "preempt"
    FINISH = "finish"
    ABORT = "abort"
    FAIL = "fail"


_S, _E = RequestState, RequestEvent

ENDED = frozenset({_S.COMPLETED, _S.ABORTED, _S.ERROR})
"""The states without a way out: the request has had its one answer."""

REQUEST_TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (_S.WAITING, _E.DISPATCH): _S.RUNNING,
    (_S.WAITING, _E.ABORT): _S.ABORTED,
    (_S.WAITING, _E.FAIL): _S.ERROR,
    (_S.RUNNING, _E.PREEMPT): _S.PREEMPTED,
    (_S.RUNNING, _E.FINISH): _S.COMPLETED,
    (_S.RUNNING, _E.ABORT): _S.ABORTED,
    (_S.RUNNING, _E.FAIL): _S.ERROR,
    (_S.PREEMPTED, _E.DISPATCH): _S.RUNNING,
    (_S.PREEMPTED, _E.FINISH): _S.COMPLETED,  # its last step was under way when it was preempted
    (_S.PREEMPTED, _E.ABORT): _S.ABORTED,
    (_S.PREEMPTED, _E.FAIL): _S.ERROR,
}


@dataclass(slots=True, eq=False)
class Request:
    """One accepted request as the scheduler sees it; equal only to itself.

    Two requests may bear the same `id` one after the other, so everything that must not reach
    the wrong one holds the object, not the id.
    """

    id: str
    client: str
    deadline_at: float  # on the clock the scheduler's caller uses
    priority: int = 0  # the higher goes first
    state: RequestState = RequestState.WAITING
    replica: str | None = None  # where it runs, or ran last
    preemptions: int = 0  # for one of a higher priority

    @property
    def ended(self) -> bool:
        """Whether it has had its answer."""
        return self.state in ENDED

    def apply(self, event: RequestEvent) -> None:
        """Move along the table; `IllegalTransition` says what cannot happen now."""
        try:
            self.state = REQUEST_TRANSITIONS[self.state, event]
        except KeyError:
            who = f"request {self.id}"
            raise IllegalTransition(who, self.state.value, event.value) from None
