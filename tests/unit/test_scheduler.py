"""The scheduler, by example and against a model."""

# ruff: noqa: D102  (names of rules say what they do)
from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stopbath.engine.request import Request, RequestEvent, RequestState
from stopbath.engine.scheduler import PREEMPTIONS, Scheduler
from stopbath.errors import Overloaded, RequestDuplicate


def scheduler(queue_limit: int = 8, **replicas: int) -> Scheduler:
    made = Scheduler(queue_limit)
    for name, capacity in replicas.items():
        made.add_replica(name, capacity)
    return made


def test_clients_take_turns() -> None:
    """A client with three requests waiting delays another's first by one request, not by three."""
    queue = scheduler(a=1)
    for number, client in enumerate(["greedy", "greedy", "greedy", "modest"]):
        queue.submit(f"{client}{number}", client, 99.0)
    order = []
    while started := queue.dispatch():
        order.append(started[0].client)
        queue.end(started[0], RequestEvent.FINISH)
        queue.release(started[0])
    assert order == ["greedy", "modest", "greedy", "greedy"]


def test_the_queue_is_bounded_and_counts_only_who_waits() -> None:
    """What can run at once is not counted against the queue; one too many is refused."""
    queue = scheduler(queue_limit=1, a=1)
    queue.submit("1", "c", 99.0)
    queue.dispatch()
    queue.submit("2", "c", 99.0)
    with pytest.raises(Overloaded, match="1 requests wait"):
        queue.submit("3", "c", 99.0)


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    """One id never stands for two living requests."""
    queue = scheduler(a=1)
    first = queue.submit("same", "c", 99.0)
    with pytest.raises(RequestDuplicate, match="same"):
        queue.submit("same", "c", 99.0)
    queue.end(first, RequestEvent.ABORT)
    assert queue.submit("same", "c", 99.0) is not first


def test_an_aborted_request_holds_its_place_until_its_call_is_over() -> None:
    """The replica is busy until then: the next request must not be sent there."""
    queue = scheduler(a=1)
    first = queue.submit("1", "c", 99.0)
    queue.dispatch()
    queue.submit("2", "c", 99.0)
    queue.end(first, RequestEvent.ABORT)
    assert queue.dispatch() == []
    queue.release(first)
    assert [request.id for request in queue.dispatch()] == ["2"]


def test_the_freest_replica_is_taken() -> None:
    """Work spreads before it piles up."""
    queue = scheduler(a=2, b=2)
    for number in range(4):
        queue.submit(str(number), "c", 99.0)
    assert sorted(r.replica or "" for r in queue.dispatch()[:2]) == ["a", "b"]


def test_a_lost_replica_ends_what_it_ran_and_nothing_else() -> None:
    """Who waits goes to a living replica."""
    queue = scheduler(a=1, b=1)
    for number in range(3):
        queue.submit(str(number), "c", 99.0)
    queue.dispatch()
    assert [r.replica for r in queue.lose_replica("a")] == ["a"]
    assert (queue.waiting, queue.running) == (1, 1)
    last = queue.lose_replica("b")
    assert {r.state for r in last} == {RequestState.ERROR}
    assert (queue.waiting, queue.running) == (0, 0)


def test_a_preempted_request_goes_first() -> None:
    """Work that had begun is not sent to the end of the queue."""
    queue = scheduler(a=1)
    first = queue.submit("1", "c", 99.0)
    queue.submit("2", "d", 99.0)
    queue.dispatch()
    queue.preempt(first)
    assert queue.dispatch() == [first]


def test_a_higher_priority_goes_first_and_clients_take_turns_within_it() -> None:
    queue = scheduler(a=1)
    for number, (client, priority) in enumerate(
        [("x", 0), ("x", 5), ("x", 5), ("y", 5), ("y", -3), ("z", 0)]
    ):
        queue.submit(f"{client}{number}", client, 99.0, priority)
    order = []
    while started := queue.dispatch():
        order.append(started[0].id)
        queue.end(started[0], RequestEvent.FINISH)
        queue.release(started[0])
    assert order == ["x1", "y3", "x2", "x0", "z5", "y4"]


def test_a_retried_request_goes_back_before_the_queue() -> None:
    """Its replica is gone; with another one it runs there, with none it waits if it may."""
    queue = scheduler(a=1, b=1)
    first, second, _ = (queue.submit(name, "c", 99.0) for name in "123")
    queue.dispatch()
    assert queue.lose_replica("a", retry={first}) == []
    assert first.state is RequestState.PREEMPTED
    queue.end(second, RequestEvent.FINISH)
    queue.release(second)
    assert queue.dispatch() == [first]
    assert queue.lose_replica("b", retry={first}, keep_queue=True) == []
    assert (queue.waiting, queue.running) == (2, 0)
    assert {request.id for request in queue.give_up()} == {"1", "3"}
    assert (queue.waiting, queue.running) == (0, 0)


def urgent_queue(**replicas: int) -> Scheduler:
    made = Scheduler(8, preempts=True)
    for name, capacity in replicas.items():
        made.add_replica(name, capacity)
    return made


def test_an_urgent_request_takes_the_place_of_the_least_urgent_last_come() -> None:
    """Which goes on in its replica once a place is free and nobody more urgent waits."""
    queue = urgent_queue(a=3)
    usual, low, last = (queue.submit(n, "c", 99.0, p) for n, p in [("0", 0), ("1", -1), ("2", -1)])
    assert set(queue.dispatch()) == {usual, low, last}
    queue.submit("equal", "c", 99.0, -1)
    assert queue.make_room() is None, "equals do not preempt each other"
    urgent = queue.submit("urgent", "c", 99.0, 5)
    assert queue.make_room() is last
    assert queue.dispatch() == [urgent]
    queue.end(urgent, RequestEvent.FINISH)
    queue.release(urgent)
    assert queue.dispatch() == [last], "before its equal, which has not begun"


def test_a_request_is_preempted_so_often_and_no_more() -> None:
    queue = urgent_queue(a=1)
    patient = queue.submit("patient", "c", 99.0)
    queue.dispatch()
    for number in range(PREEMPTIONS):
        urgent = queue.submit(str(number), "c", 99.0, 1)
        assert queue.make_room() is patient
        assert queue.dispatch() == [urgent]
        queue.end(urgent, RequestEvent.FINISH)
        queue.release(urgent)
        assert queue.dispatch() == [patient]
    queue.submit("late", "c", 99.0, 1)
    assert queue.make_room() is None


def test_a_replica_holds_no_more_than_it_has_places() -> None:
    """What is on hold takes memory on the device: the still more urgent waits, too."""
    queue = urgent_queue(a=1)
    usual = queue.submit("usual", "c", 99.0)
    queue.dispatch()
    urgent = queue.submit("urgent", "c", 99.0, 1)
    assert queue.make_room() is usual
    assert queue.dispatch() == [urgent]
    queue.submit("most urgent", "c", 99.0, 2)
    assert queue.make_room() is None


def test_without_preemption_the_urgent_wait() -> None:
    """Request mode: one request has the whole model until its end."""
    queue = scheduler(a=1)
    queue.submit("1", "c", 99.0)
    queue.dispatch()
    queue.submit("2", "c", 99.0, 9)
    assert queue.make_room() is None


def test_without_anywhere_to_go_a_retry_is_an_end() -> None:
    queue = scheduler(a=1)
    first = queue.submit("1", "c", 99.0)
    queue.dispatch()
    assert queue.lose_replica("a", retry={first}) == [first]
    assert first.state is RequestState.ERROR


class SchedulerModel(RuleBasedStateMachine):
    """No request lost, none answered twice, no capacity exceeded, whatever comes when."""

    LIMIT = 4

    def __init__(self) -> None:
        super().__init__()
        self.queue = Scheduler(self.LIMIT, preempts=True)
        self.capacity: dict[str, int] = {}
        self.accepted: list[Request] = []
        self.answered: list[Request] = []
        self.calls: dict[Request, str] = {}  # calls that have not ended, with their replica
        self.parked: dict[Request, str] = {}  # on hold there
        self.now = 0.0
        self.replicas_made = 0
        self.lost_names: set[str] = set()

    def pick(self, data: st.DataObject, candidates: list[Request]) -> Request:
        return data.draw(st.sampled_from(candidates))

    def living(self) -> list[Request]:
        return [r for r in self.accepted if r not in self.answered]

    @rule(capacity=st.integers(1, 3))
    def add_replica(self, capacity: int) -> None:
        name = f"r{self.replicas_made}"
        self.replicas_made += 1
        self.capacity[name] = capacity
        self.queue.add_replica(name, capacity)

    @precondition(lambda self: self.lost_names)
    @rule(data=st.data(), capacity=st.integers(1, 3))
    def restore_replica(self, data: st.DataObject, capacity: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.lost_names)))
        self.lost_names.discard(name)
        self.capacity[name] = capacity
        self.queue.add_replica(name, capacity)

    @rule(
        name=st.integers(0, 9),
        client=st.sampled_from("xyz"),
        left=st.floats(0.1, 9),
        priority=st.integers(-2, 2),
    )
    def submit(self, name: int, client: str, left: float, priority: int) -> None:
        taken = str(name) in {r.id for r in self.living()}
        try:
            request = self.queue.submit(str(name), client, self.now + left, priority)
        except RequestDuplicate:
            assert taken
        except Overloaded:
            assert self.queue.waiting - len(self.parked) >= self.LIMIT
        else:
            assert not taken
            self.accepted.append(request)

    @rule()
    def dispatch(self) -> None:
        first = [r for r in self.living() if r.state is RequestState.PREEMPTED]
        first = [r for r in first if r not in self.parked]
        rest = [r for r in self.living() if r.state is RequestState.WAITING]
        started = self.queue.dispatch()
        assert set(started[: len(first)]) <= set(first), "who is begun anew goes first"
        ranks = [r.priority for r in started[len(first) :] if r not in self.parked]
        assert ranks == sorted((r.priority for r in rest), reverse=True)[: len(ranks)]
        for request in started:
            assert request not in self.answered
            assert request not in self.calls, "sent twice"
            where = self.parked.pop(request, request.replica)
            assert where == request.replica, "it goes on where its latents are"
            self.calls[request] = request.replica or ""
        free = sum(self.capacity.values()) - len(self.calls)
        waiting = self.queue.waiting - len(self.parked)
        assert free == 0 or waiting == 0, "a free place stays free while one waits"
        for where in set(self.parked.values()):
            assert list(self.calls.values()).count(where) == self.capacity[where], "one is on hold"

    @rule()
    def make_room(self) -> None:
        waiting = [r.priority for r in self.living() if r.state is RequestState.WAITING]
        free = sum(self.capacity.values()) - len(self.calls)
        request = self.queue.make_room()
        if request is None:
            return
        assert free == 0, "a place was free"
        assert request.priority < max(waiting), "nobody was more urgent"
        assert request.preemptions <= PREEMPTIONS
        assert request.state is RequestState.PREEMPTED
        where = self.parked[request] = self.calls.pop(request)
        assert list(self.parked.values()).count(where) <= self.capacity[where]
        started = self.queue.dispatch()
        assert [r.replica for r in started] == [where], "its place is taken at once"
        assert all(r.priority > request.priority or r.preemptions == 0 for r in started)
        for each in started:
            assert each not in self.calls
            self.parked.pop(each, None)
            self.calls[each] = where

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), event=st.sampled_from([RequestEvent.FINISH, RequestEvent.FAIL]))
    def call_ends(self, data: st.DataObject, event: RequestEvent) -> None:
        request = self.pick(data, list(self.calls))
        if not request.ended:
            self.queue.end(request, event)
            self.answered.append(request)
        self.queue.release(request)
        del self.calls[request]

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = self.pick(data, self.living())
        assert self.queue.find(request.id) is request
        self.queue.end(request, RequestEvent.ABORT)
        self.answered.append(request)
        self.parked.pop(request, None)

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def a_last_step_was_under_way(self, data: st.DataObject) -> None:
        request = self.pick(data, list(self.parked))
        del self.parked[request]
        self.queue.end(request, RequestEvent.FINISH)
        self.answered.append(request)
        self.queue.release(request)

    @precondition(lambda self: [r for r in self.living() if r in self.calls])
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request = self.pick(data, [r for r in self.living() if r in self.calls])
        self.queue.preempt(request)
        del self.calls[request]

    @rule(seconds=st.floats(0, 5))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        late = {r for r in self.living() if r.deadline_at <= self.now}
        expired = [request for request, _ in self.queue.expire(self.now)]
        assert set(expired) == late
        assert len(expired) == len(late)
        self.answered += expired
        for request in expired:
            self.parked.pop(request, None)

    @precondition(lambda self: self.capacity)
    @rule(data=st.data(), retries=st.booleans(), keep_queue=st.booleans())
    def lose_replica(self, data: st.DataObject, *, retries: bool, keep_queue: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.capacity)))
        ran_there = {r for r, where in {**self.calls, **self.parked}.items() if where == name}
        ended = {r for r in self.living() if r in ran_there}
        retry = {request for request in ended if retries and data.draw(st.booleans())}
        expected = ended - retry
        del self.capacity[name]
        self.lost_names.add(name)
        if not (self.capacity or keep_queue):
            expected |= retry | {r for r in self.living() if r not in self.calls}
        lost = self.queue.lose_replica(name, retry=retry, keep_queue=keep_queue)
        assert set(lost) == expected
        assert len(lost) == len(expected)
        self.answered += lost
        for request in ran_there:
            self.calls.pop(request, None)
            self.parked.pop(request, None)

    @precondition(lambda self: not self.capacity)
    @rule()
    def give_up(self) -> None:
        lost = self.queue.give_up()
        assert set(lost) == set(self.living())
        self.answered += lost

    @invariant()
    def none_is_lost_or_answered_twice(self) -> None:
        assert len(self.answered) == len(set(self.answered))
        assert self.queue.waiting + self.queue.running == len(self.living())
        assert all(r.ended == (r in self.answered) for r in self.accepted)
        assert self.queue.next_deadline() == min(
            (r.deadline_at for r in self.living()), default=None
        )

    @invariant()
    def capacity_holds(self) -> None:
        for name, capacity in self.capacity.items():
            assert sum(where == name for where in self.calls.values()) <= capacity
        assert self.queue.running == sum(r in self.calls for r in self.living())


SchedulerModel.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSchedulerModel = SchedulerModel.TestCase
