"""The engine: one answer for each accepted request, whatever happens to it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from fake_executor import KILLED, MODEL, FakeExecutor
from fake_server import PATIENCE_S, next_call
from stopbath.engine.engine import Engine
from stopbath.engine.state import EngineState
from stopbath.errors import (
    DeadlinePassed,
    Draining,
    EngineError,
    Overloaded,
    RequestAborted,
    RequestDuplicate,
    Starting,
    WorkerLost,
)
from stopbath.lifecycle import Deadline
from stopbath.messages import GenerationRequest, GenerationResult

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def request(request_id: str = "r1") -> GenerationRequest:
    return GenerationRequest(
        id=request_id, prompt="a seven", width=64, height=64, seed=1, num_inference_steps=4,
        guidance_scale=1.0,
    )  # fmt: skip


def engine(*executors: FakeExecutor, **options: Any) -> Engine:
    made = Engine(executors, **options)
    made.watch()
    made.ready(MODEL)
    return made


def ask(
    made: Engine, request_id: str = "r1", within_s: float = 60, **more: Any
) -> asyncio.Task[GenerationResult]:
    by = Deadline.after(within_s)

    async def generate() -> GenerationResult:
        return await made.result(made.submit(request(request_id), client="c", deadline=by, **more))

    return asyncio.create_task(generate())


async def outcome(task: asyncio.Task[GenerationResult]) -> Any:
    """Give the one answer, also when it is an exception."""
    done, _ = await asyncio.wait({task}, timeout=PATIENCE_S)
    assert done, "no answer came"
    return task.exception() or task.result()


async def test_an_answer_comes_back() -> None:
    """The replica gets the request as builtins; the client gets its pictures and the progress."""
    replica = FakeExecutor()
    heard: list[tuple[int, int]] = []
    task = ask(engine(replica), on_progress=lambda step, steps: heard.append((step, steps)))
    call = await next_call(replica)
    assert call.params["prompt"] == "a seven"
    assert call.on_progress is not None
    call.on_progress(1, 4)
    call.finish([b"QUJD"])
    assert (await outcome(task)).images_b64 == [b"QUJD"]
    assert heard == [(1, 4)]


async def test_leaving_gives_up_that_request_and_no_other() -> None:
    """Cancelling one caller cancels its call; the others never notice."""
    replica = FakeExecutor()
    made = engine(replica, capacity=2)
    leaver, stayer = ask(made, "leaver"), ask(made, "stayer")
    await next_call(replica)
    await next_call(replica)
    leaver.cancel()
    await asyncio.wait({leaver}, timeout=PATIENCE_S)
    first, second = replica.calls
    assert (first.cancelled.is_set(), second.cancelled.is_set()) == (True, False)
    second.finish()
    assert isinstance(await outcome(stayer), GenerationResult)


async def test_leaving_the_queue_never_reaches_a_replica() -> None:
    """A waiting request whose client left is not run."""
    replica = FakeExecutor()
    made = engine(replica)
    ask(made, "running")
    call = await next_call(replica)
    waiting = ask(made, "waiting")
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting}, timeout=PATIENCE_S)
    call.finish()
    last = ask(made, "last")
    (await next_call(replica)).finish()
    await outcome(last)
    assert [c.params["id"] for c in replica.calls] == ["running", "last"]


async def test_a_late_abort_misses_the_next_request() -> None:
    """An id that has had its answer is unknown, and its call's end touches nobody else."""
    replica = FakeExecutor(slow_cancel=True)
    made = engine(replica)
    first = ask(made, "same")
    old = await next_call(replica)
    assert made.abort("same")
    assert isinstance(await outcome(first), RequestAborted)
    assert not made.abort("same")
    second = ask(made, "same")  # waits: the replica is still busy with the old call
    await asyncio.sleep(0)
    assert made.status().waiting == 1
    old.fail("Cancelled", "given up")
    (await next_call(replica)).finish()
    assert isinstance(await outcome(second), GenerationResult)


async def test_refusals_by_state() -> None:
    """Only a ready engine accepts, and each refusal says why."""
    replica = FakeExecutor()
    made = Engine([replica], queue_limit=1)
    made.watch()
    assert isinstance(await outcome(ask(made)), Starting)
    made.ready(MODEL)
    running = ask(made, "1")
    call = await next_call(replica)
    waiting = ask(made, "2")
    assert isinstance(await outcome(ask(made, "2")), RequestDuplicate)
    assert isinstance(await outcome(ask(made, "3")), Overloaded)
    draining = asyncio.create_task(made.drain(Deadline.after(PATIENCE_S)))
    await asyncio.sleep(0)
    assert isinstance(await outcome(ask(made, "4")), Draining)
    call.finish()
    (await next_call(replica)).finish()
    await draining
    assert isinstance(await outcome(running), GenerationResult)
    assert isinstance(await outcome(waiting), GenerationResult)
    assert made.unfinished == 0


async def test_a_drain_that_does_not_fit_answers_the_rest() -> None:
    """At the drain's deadline everybody has an answer, and the call is given up."""
    replica = FakeExecutor(slow_cancel=True)
    made = engine(replica)
    running, waiting = ask(made, "running"), ask(made, "waiting")
    call = await next_call(replica)
    await asyncio.wait_for(made.drain(Deadline.after(0.05)), PATIENCE_S)
    assert isinstance(await outcome(running), DeadlinePassed)
    assert isinstance(await outcome(waiting), Draining)
    assert call.cancelled.is_set()
    assert (made.unfinished, made.state) == (2, EngineState.STOPPED)


async def test_a_requests_own_deadline() -> None:
    """Both a waiting and a running request end at their deadline, though no replica answers."""
    replica = FakeExecutor(slow_cancel=True)
    made = engine(replica)
    running, waiting = ask(made, "running", 0.05), ask(made, "waiting", 0.05)
    for task, where in ((running, "unfinished"), (waiting, "queue")):
        error = await outcome(task)
        assert isinstance(error, DeadlinePassed)
        assert where in str(error)
    assert replica.calls[0].cancelled.is_set()


async def test_a_lost_worker_fails_its_requests_at_once() -> None:
    """Readiness is gone in the same turn of the loop; every request hears worker and signal."""
    replica = FakeExecutor()
    made = engine(replica)
    running, waiting = ask(made, "running"), ask(made, "waiting")
    await next_call(replica)
    began = time.monotonic()
    replica.die()
    await asyncio.sleep(0)
    assert made.state is EngineState.DEAD
    for task in (running, waiting):
        error = await outcome(task)
        assert isinstance(error, WorkerLost)
        assert "rank1" in str(error)
        assert "SIGKILL" in str(error)
    assert time.monotonic() - began < 0.1
    assert isinstance(await outcome(ask(made, "later")), WorkerLost)
    await asyncio.wait_for(made.dead(), PATIENCE_S)
    assert made.unfinished == 2


async def test_a_failed_call_counts_before_the_cause_is_told() -> None:
    """When the call's end comes first, the next request is not sent to the dead replica."""
    dying, living = FakeExecutor("dying"), FakeExecutor("living")
    made = engine(dying, living)
    lost, kept = ask(made, "1"), ask(made, "2")
    await next_call(dying)
    call = await next_call(living)
    waiting = ask(made, "3")
    dying.cause = KILLED
    dying.calls[0].future.set_exception(WorkerLost("a rank is gone"))
    assert "SIGKILL" in str(await outcome(lost))
    call.finish()
    (await next_call(living)).finish()
    assert isinstance(await outcome(kept), GenerationResult)
    assert isinstance(await outcome(waiting), GenerationResult)
    assert len(dying.calls) == 1
    assert (made.state, made.cause is not None) == (EngineState.READY, True)


async def test_a_call_that_cannot_begin_goes_to_another_replica() -> None:
    """A replica found dead at the call costs the request nothing while another lives."""
    dying, living = FakeExecutor("dying"), FakeExecutor("living", instant=True)

    def refuse(*_: Any, **__: Any) -> Any:
        raise WorkerLost("no rank to send it to")

    dying.call = refuse  # type: ignore[method-assign]
    made = engine(dying, living)
    assert isinstance(await outcome(ask(made)), GenerationResult)
    assert made.cause == "dying: no rank to send it to"


async def test_an_executor_that_raises_fails_only_that_request() -> None:
    """A bug in a call does not take the loop, or the place in the replica, with it."""
    replica = FakeExecutor()
    real_call = replica.call

    def broken(*_: Any, **__: Any) -> Any:
        raise TypeError("cannot be encoded")

    replica.call = broken  # type: ignore[method-assign]
    made = engine(replica)
    error = await outcome(ask(made, "1"))
    assert type(error) is EngineError
    assert "TypeError: cannot be encoded" in str(error)
    replica.call = real_call  # type: ignore[method-assign]
    task = ask(made, "2")
    (await next_call(replica)).finish()
    assert isinstance(await outcome(task), GenerationResult)


async def test_an_answer_that_is_not_pictures() -> None:
    """Whatever a rank returns, the request gets an answer."""
    replica = FakeExecutor()
    task = ask(engine(replica))
    call = await next_call(replica)
    call.params["n"] = 0
    call.future.set_result([])
    assert type(await outcome(task)) is EngineError


async def test_deaths_after_the_stop_are_no_fault() -> None:
    """Ranks that end because they were asked to do not make the engine dead."""
    replica = FakeExecutor()
    made = engine(replica)
    made.stop("asked")
    replica.die()
    await asyncio.sleep(0)
    assert (made.state, made.cause) == (EngineState.STOPPED, None)


async def test_an_urgent_request_has_another_put_on_hold_which_goes_on_in_its_place() -> None:
    """The call that was begun is the one that answers; nothing is begun twice."""
    replica = FakeExecutor()
    made = engine(replica, preempts=True)
    usual = ask(made, "usual")
    first = await next_call(replica)
    urgent = ask(made, "urgent", priority=1)
    second = await next_call(replica)
    assert (first.held, second.params["id"]) == (True, "urgent")
    assert (made.status().waiting, made.status().running) == (1, 1)
    second.finish()
    assert isinstance(await outcome(urgent), GenerationResult)
    assert not first.held
    first.finish()
    assert isinstance(await outcome(usual), GenerationResult)
    assert len(replica.calls) == 2


async def test_a_request_on_hold_can_be_given_up_and_is_lost_with_its_replica() -> None:
    replica, other = FakeExecutor("replica0"), FakeExecutor("replica1")
    made = engine(replica, other, preempts=True)
    usual = [ask(made, name) for name in ("a", "b")]
    calls = [await next_call(each) for each in (replica, other)]
    urgent = [ask(made, name, priority=1) for name in ("c", "d")]
    for each in (replica, other):
        await next_call(each)
    assert [call.held for call in calls] == [True, True]
    made.abort(calls[1].params["id"])
    replica.die()
    answers = {type(await outcome(task)) for task in usual}
    assert answers == {RequestAborted, WorkerLost}
    assert calls[1].cancelled.is_set()
    other.calls[1].finish()
    assert {type(await outcome(task)) for task in urgent} == {GenerationResult, WorkerLost}
    assert (made.status().waiting, made.status().running) == (0, 0)


async def test_a_replica_that_cannot_be_told_to_go_on_fails_that_request() -> None:
    """Its channel is full: it would stay on hold until its deadline."""
    replica = FakeExecutor()
    made = engine(replica, preempts=True)
    usual = ask(made, "usual")
    call = await next_call(replica)
    urgent = ask(made, "urgent", priority=1)
    second = await next_call(replica)
    replica.deaf = True
    second.finish()
    assert isinstance(await outcome(urgent), GenerationResult)
    assert "does not read" in str(await outcome(usual))
    assert call.cancelled.is_set()
