"""The engine against a model: whatever comes when, each request has exactly one answer."""

# ruff: noqa: D102  (names of rules say what they do)
from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fake_executor import KILLED, MODEL, FakeCall, FakeExecutor
from stopbath.engine.engine import Engine
from stopbath.engine.state import EngineState
from stopbath.errors import EngineError, RequestAborted, RequestDuplicate
from stopbath.lifecycle import Deadline
from stopbath.messages import GenerationRequest, GenerationResult

REPLICAS = ("replica0", "replica1", "replica2")
CAPACITY = 2
LIMIT = 4


def active(executor: FakeExecutor) -> list[FakeCall]:
    """Give the calls that take a place."""
    return [call for call in executor.calls if not (call.future.done() or call.held)]


def on_hold(executor: FakeExecutor) -> list[FakeCall]:
    """Give the calls that are wanted, and have no place now."""
    open_ = (call for call in executor.calls if not call.future.done())
    return [call for call in open_ if call.held and not call.cancelled.is_set()]


class EngineModel(RuleBasedStateMachine):
    """Deaths, restarts, retries, preemptions, aborts, leaving clients and a drain, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.executors = {name: FakeExecutor(name, slow_cancel=True) for name in REPLICAS}
        self.restarting: set[str] = set()
        self.tasks: list[asyncio.Task[GenerationResult]] = []
        self.left: set[asyncio.Task[GenerationResult]] = set()
        self.promise = True  # whether the next loss is restarted
        self.stopped = False
        self.run(self.begin())

    def run(self, work: Any) -> Any:
        """Do something on the loop, and let everything settle that follows from it."""

        async def settled() -> Any:
            value = await work
            for _ in range(8):
                await asyncio.sleep(0)
            return value

        return self.loop.run_until_complete(settled())

    async def begin(self) -> None:
        self.engine = Engine(
            list(self.executors.values()),
            queue_limit=LIMIT,
            capacity=CAPACITY,
            preempts=True,
            retry_on_death=True,
        )
        self.engine.watch()
        self.engine.ready(MODEL)
        self.engine.replicas.restarts_with(self.restarts)

    def restarts(self, name: str) -> bool:
        if self.promise:
            self.restarting.add(name)
        return self.promise

    def open_calls(self) -> list[tuple[FakeExecutor, FakeCall]]:
        return [
            (executor, call)
            for executor in self.executors.values()
            for call in executor.calls
            if not call.future.done()
        ]

    # -- what can happen

    @rule(number=st.integers(0, 9), heard=st.booleans(), priority=st.integers(-1, 1))
    def submit(self, number: int, *, heard: bool, priority: int) -> None:
        request = GenerationRequest(
            id=str(number), prompt="a", width=8, height=8, seed=1, num_inference_steps=1,
            guidance_scale=1.0,
        )  # fmt: skip

        async def ask() -> None:
            try:
                job = self.engine.submit(
                    request,
                    client=str(number % 2),
                    deadline=Deadline.after(600),
                    priority=priority,
                    on_progress=(lambda *_: None) if heard else None,
                )
            except (EngineError, RequestDuplicate):
                return  # refused: it was never accepted
            self.tasks.append(asyncio.ensure_future(self.engine.result(job)))

        self.run(ask())

    @precondition(lambda self: self.open_calls())
    @rule(data=st.data(), how=st.sampled_from(["finish", "fail", "step"]))
    def a_rank_says(self, data: st.DataObject, how: str) -> None:
        _, call = data.draw(st.sampled_from(self.open_calls()))

        async def say() -> None:
            if how == "finish":
                call.finish()
            elif how == "fail":
                call.fail("Cancelled" if call.cancelled.is_set() else "RuntimeError", "oh")
            elif call.on_progress is not None:
                call.on_progress(1, 1)

        self.run(say())

    @precondition(lambda self: [t for t in self.tasks if not t.done()])
    @rule(data=st.data())
    def a_client_leaves(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from([t for t in self.tasks if not t.done()]))

        async def leave() -> None:
            task.cancel()
            self.left.add(task)

        self.run(leave())

    @rule(number=st.integers(0, 9))
    def abort(self, number: int) -> None:
        async def give_up() -> None:
            self.engine.abort(str(number))

        self.run(give_up())

    @rule(
        name=st.sampled_from(REPLICAS),
        promise=st.booleans(),
        order=st.sampled_from(["cause first", "calls first"]),
    )
    def a_replica_dies(self, name: str, *, promise: bool, order: str) -> None:
        executor = self.executors[name]
        if executor.cause is not None:
            return
        self.promise = promise

        async def die() -> None:
            if order == "cause first":
                executor.die()
                return
            callbacks, executor._callbacks = executor._callbacks, []
            executor.die()
            await asyncio.sleep(0)
            for callback in callbacks:
                callback(KILLED)

        self.run(die())

    @precondition(lambda self: self.restarting)
    @rule(data=st.data(), end=st.sampled_from(["restored", "given up", "restored and dead"]))
    def a_restart_ends(self, data: st.DataObject, end: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.restarting)))
        self.restarting.discard(name)
        new = FakeExecutor(name, slow_cancel=True)

        async def finish() -> None:
            self.engine.replicas.replace(name, new)
            if end == "given up":
                self.engine.give_up(name, f"{name} is not restarted again")
                return
            self.executors[name] = new
            if end == "restored and dead":
                new.die()
            self.engine.restore(name)

        self.run(finish())

    @precondition(lambda self: not self.stopped)
    @rule(drain=st.booleans())
    def stop(self, *, drain: bool) -> None:
        self.stopped = True
        self.restarting.clear()  # as the fleet ceases

        async def end() -> None:
            if drain:
                await self.engine.drain(Deadline.after(0))
            else:
                self.engine.stop("asked")

        self.run(end())

    # -- what holds always

    @invariant()
    def every_accepted_request_is_somewhere_or_answered_once(self) -> None:
        open_tasks = [task for task in self.tasks if not task.done()]
        now = self.engine.status()
        assert now.waiting + now.running == len(open_tasks)
        for task in self.tasks:
            if task.done() and not task.cancelled():
                error = task.exception()
                assert error is None or isinstance(error, (EngineError, RequestAborted)), error
        assert all(task.done() for task in self.left)

    @invariant()
    def capacity_holds(self) -> None:
        for executor in self.executors.values():
            assert len(active(executor)) <= CAPACITY
            assert len(on_hold(executor)) <= CAPACITY

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        """While a place is free or no replica can come, nothing waits; a stop leaves nothing."""
        now = self.engine.status()
        living = [e for e in self.executors.values() if e.cause is None]
        free = len(living) * CAPACITY - sum(len(active(executor)) for executor in living)
        held = {executor: on_hold(executor) for executor in living}
        if self.stopped or (not living and not self.restarting):
            assert now.waiting + now.running == 0
        elif living and free:
            assert now.waiting == sum(map(len, held.values()))
        for executor, calls in held.items():
            assert self.stopped or not calls or len(active(executor)) == CAPACITY

    @invariant()
    def readiness_is_true(self) -> None:
        living = any(executor.cause is None for executor in self.executors.values())
        if self.stopped:
            assert self.engine.state is EngineState.STOPPED
        else:
            assert (self.engine.state is EngineState.READY) == living
            dead = not living and not self.restarting
            assert (self.engine.state is EngineState.DEAD) == dead

    def teardown(self) -> None:
        async def end() -> None:
            if not self.stopped:
                self.engine.stop("the test is over")
            await asyncio.gather(*self.tasks, return_exceptions=True)

        self.run(end())
        self.loop.close()


EngineModel.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestEngineModel = EngineModel.TestCase
