"""Who runs next, and where: pure policy, no I/O and no clock of its own."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from stopbath.engine.request import Request, RequestEvent, RequestState
from stopbath.errors import Overloaded, RequestDuplicate

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["PREEMPTIONS", "Scheduler"]

PREEMPTIONS: Final = 2
"""How often one request is preempted at most: so that a stream of urgent ones cannot keep it
from its end for ever, nor the replica busy with going back and forth."""


@dataclass(slots=True)
class _Slots:
    """What one replica can take, and what holds a place there now."""

    capacity: int
    held: set[Request] = field(default_factory=set)
    parked: list[Request] = field(default_factory=list)  # preempted, on hold in the replica

    @property
    def free(self) -> int:
        return self.capacity - len(self.held)


class Scheduler:
    """A bounded queue in front of replicas.

    Of those who wait the highest priority goes first. Within a priority clients take turns: one
    with forty requests waiting delays another's first by one request, not by forty. A request
    holds its place in a replica from `dispatch` until `release`, also when it has been answered
    before (aborted, expired): the replica is busy until its call ends.

    With `preempts` a request of a higher priority that finds no place free takes that of one of a
    lower: the lowest there is, of equals the one that came last. That one stays on hold where it
    ran, at most as many there as there are places, and goes on there as soon as a place is free
    and nobody of a higher priority waits.
    """

    def __init__(self, queue_limit: int, *, preempts: bool = False) -> None:
        self._queue_limit = queue_limit
        self._preempts = preempts
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
        slots = self._slots.get(name, _Slots(0))
        there = slots.held.union(slots.parked)
        lost = []
        for request in [r for r in self._live.values() if r in there]:
            if request not in retry:
                lost.append(request)
            elif request in slots.parked:
                slots.parked.remove(request)
                self._resumed.append(request)
            else:
                self.preempt(request)
        for request in lost:
            self.end(request, RequestEvent.FAIL)
        self._slots.pop(name, None)
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
        queued = self.waiting - sum(len(slots.parked) for slots in self._slots.values())
        if queued >= self._queue_limit + sum(slots.free for slots in self._slots.values()):
            raise Overloaded(f"the queue is full: {queued} requests wait; try again later")
        request = Request(request_id, client, deadline_at, priority)
        self._live[request_id] = request
        turns = self._turns.setdefault(priority, OrderedDict())
        turns.setdefault(client, deque()).append(request)
        return request

    def dispatch(self) -> list[Request]:
        """Give the requests to run now, each with its `replica`, moved to RUNNING.

        Some of them begin; those that were on hold go on, in the replica they were in.
        """
        started: list[Request] = []
        while (found := self._next()) is not None:
            request, name = found
            request.apply(RequestEvent.DISPATCH)
            request.replica = name
            self._slots[name].held.add(request)
            started.append(request)
        return started

    def make_room(self) -> Request | None:
        """Give the request that is to be put on hold for a more urgent one, moved to PREEMPTED.

        One at a time: after it `dispatch` starts the other.
        """
        if not (self._preempts and self._turns) or self._freest() is not None:
            return None
        urgent = max(self._turns)
        candidates = [
            request
            for slots in self._slots.values()
            if len(slots.parked) < slots.capacity
            for request in slots.held
            if request.state is RequestState.RUNNING
            and request.priority < urgent
            and request.preemptions < PREEMPTIONS
        ]
        if not candidates:
            return None
        order = {request: place for place, request in enumerate(self._live.values())}
        request = min(candidates, key=lambda each: (each.priority, -order[each]))
        request.apply(RequestEvent.PREEMPT)
        request.preemptions += 1
        slots = self._slots[request.replica or ""]
        slots.held.discard(request)
        slots.parked.append(request)
        return request

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
        """Take a running request from its replica, to be begun anew: it is the next to be."""
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
        parked = sum(len(slots.parked) for slots in self._slots.values())
        queues = (queue for turns in self._turns.values() for queue in turns.values())
        return parked + len(self._resumed) + sum(len(queue) for queue in queues)

    @property
    def running(self) -> int:
        """How many are being worked on for somebody."""
        return len(self._live) - self.waiting

    # Queue ------------------------------------------------------------------------------------

    def _freest(self) -> str | None:
        """Give the replica with the most free places, the first of equals."""
        name = max(self._slots, key=lambda name: self._slots[name].free, default=None)
        return name if name is not None and self._slots[name].free > 0 else None

    def _next(self) -> tuple[Request, str] | None:
        """Take who is to run next, and say where: begun anew, on hold, or from the queue."""
        name = self._freest()
        if name is None:
            return None
        if self._resumed:
            return self._resumed.popleft(), name
        urgent = max(self._turns, default=None)
        on_hold = [
            (request.priority, -place, request, where)
            for where, slots in self._slots.items()
            if slots.free > 0
            for place, request in enumerate(slots.parked)
            if urgent is None or request.priority >= urgent
        ]
        if on_hold:
            _, _, request, where = max(on_hold, key=lambda each: each[:2])
            self._slots[where].parked.remove(request)
            return request, where
        return None if urgent is None else (self._take_turn(), name)

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
        for slots in self._slots.values():
            if request in slots.parked:
                slots.parked.remove(request)
                return
        turns = self._turns[request.priority]
        queue = turns[request.client]
        queue.remove(request)
        if not queue:
            del turns[request.client]  # no memory of clients that have nothing here
        if not turns:
            del self._turns[request.priority]
