"""Who runs next, and where: pure policy, no I/O and no clock of its own."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stopbath.engine.request import Request, RequestEvent, RequestState
from stopbath.errors import Overloaded, RequestDuplicate

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["Scheduler"]


@dataclass(slots=True)
class _Slots:
    """What one replica can take, and what holds a place there now."""

    capacity: int
    held: set[Request] = field(default_factory=set)

    @property
    def free(self) -> int:
        return self.capacity - len(self.held)


class Scheduler:
    """A bounded queue in front of replicas.

    Of those who wait the highest priority goes first. Within a priority clients take turns: one
    with forty requests waiting delays another's first by one request, not by forty. A request
    holds its place in a replica from `dispatch` until `release`, also when it has been answered
    before (aborted, expired): the replica is busy until its call ends.
    """

    def __init__(self, queue_limit: int) -> None:
        self._queue_limit = queue_limit
        self._slots: dict[str, _Slots] = {}
        self._live: dict[str, Request] = {}
        self._resumed: deque[Request] = deque()
        # By priority, each in the order of turns: the first client is the next to be served.
        self._turns: dict[int, OrderedDict[str, deque[Request]]] = {}

    # Replicas ---------------------------------------------------------------------------------

    def add_replica(self, name: str, capacity: int = 1) -> None:
        """Let `capacity` requests at a time run on `name`."""
        self._slots[name] = _Slots(capacity)

    def lose_replica(
        self, name: str, *, retry: Collection[Request] = (), keep_queue: bool = False
    ) -> list[Request]:
        """Take a replica out; give the requests that end with it, moved to ERROR.

        Those are the ones it was running, except `retry`, which go back before all who wait.
        When it was the last replica nobody is left to wait for, unless `keep_queue`: then all
        that wait are kept for one that is to come.
        """
        slots = self._slots.pop(name, None)
        held = slots.held if slots else set()
        lost = []
        for request in [r for r in self._live.values() if r in held]:
            if request in retry:
                self.preempt(request)
            else:
                lost.append(request)
        for request in lost:
            self.end(request, RequestEvent.FAIL)
        if not (self._slots or keep_queue):
            lost += self.give_up()
        return lost

    def give_up(self) -> list[Request]:
        """End all that wait, as no replica is left or to come; give them, moved to ERROR."""
        waiting = [r for r in self._live.values() if r.state is not RequestState.RUNNING]
        for request in waiting:
            self.end(request, RequestEvent.FAIL)
        return waiting

    @property
    def replicas(self) -> tuple[str, ...]:
        """The living replicas."""
        return tuple(self._slots)

    # Requests ---------------------------------------------------------------------------------

    def submit(
        self, request_id: str, client: str, deadline_at: float, priority: int = 0
    ) -> Request:
        """Accept a request; `RequestDuplicate` or `Overloaded` when it cannot be."""
        if request_id in self._live:
            raise RequestDuplicate(f"a request with the id {request_id} is being worked on")
        if self.waiting >= self._queue_limit + sum(s.free for s in self._slots.values()):
            raise Overloaded(f"the queue is full: {self.waiting} requests wait; try again later")
        request = Request(request_id, client, deadline_at, priority)
        self._live[request_id] = request
        turns = self._turns.setdefault(priority, OrderedDict())
        turns.setdefault(client, deque()).append(request)
        return request

    def dispatch(self) -> list[Request]:
        """Give the requests to start now, each with its `replica`, moved to RUNNING."""
        started: list[Request] = []
        while self.waiting and (name := self._freest()) is not None:
            request = self._resumed.popleft() if self._resumed else self._take_turn()
            request.apply(RequestEvent.DISPATCH)
            request.replica = name
            self._slots[name].held.add(request)
            started.append(request)
        return started

    def end(self, request: Request, event: RequestEvent) -> None:
        """Record the one end of a request: FINISH, ABORT or FAIL.

        A running one keeps its place until `release`.
        """
        queued = request.state is not RequestState.RUNNING
        request.apply(event)
        del self._live[request.id]
        if queued:
            self._dequeue(request)

    def release(self, request: Request) -> None:
        """Free the place of a request whose call is over; harmless when it holds none."""
        for slots in self._slots.values():
            slots.held.discard(request)

    def preempt(self, request: Request) -> None:
        """Take a running request from its replica; it is the next to be dispatched."""
        request.apply(RequestEvent.PREEMPT)
        self.release(request)
        self._resumed.append(request)

    def expire(self, now: float) -> list[tuple[Request, RequestState]]:
        """End what is past its deadline; give each with the state it was in."""
        late = [(r, r.state) for r in self._live.values() if r.deadline_at <= now]
        for request, _ in late:
            self.end(request, RequestEvent.FAIL)
        return late

    def find(self, request_id: str) -> Request | None:
        """Give the living request with this id."""
        return self._live.get(request_id)

    def next_deadline(self) -> float | None:
        """Give the moment at which `expire` has something to do."""
        return min((request.deadline_at for request in self._live.values()), default=None)

    @property
    def waiting(self) -> int:
        """How many are accepted and not running."""
        return len(self._resumed) + sum(
            len(queue) for turns in self._turns.values() for queue in turns.values()
        )

    @property
    def running(self) -> int:
        """How many are being worked on for somebody."""
        return len(self._live) - self.waiting

    # Queue ------------------------------------------------------------------------------------

    def _freest(self) -> str | None:
        """Give the replica with the most free places, the first of equals."""
        name = max(self._slots, key=lambda name: self._slots[name].free, default=None)
        return name if name is not None and self._slots[name].free > 0 else None

    def _take_turn(self) -> Request:
        turns = self._turns[max(self._turns)]
        client, queue = next(iter(turns.items()))
        request = queue[0]
        turns.move_to_end(client)
        self._dequeue(request)
        return request

    def _dequeue(self, request: Request) -> None:
        if request in self._resumed:
            self._resumed.remove(request)
            return
        turns = self._turns[request.priority]
        queue = turns[request.client]
        queue.remove(request)
        if not queue:
            del turns[request.client]  # no memory of clients that have nothing here
        if not turns:
            del self._turns[request.priority]
