"""The engine over several replicas: isolation, moving, retrying, restarting."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fake_executor import KILLED, MODEL, FakeExecutor
from fake_server import PATIENCE_S, next_call
from stopbath.engine.engine import Engine
from stopbath.engine.state import EngineState
from stopbath.errors import Draining, EngineError, Restarting, WorkerLost
from stopbath.lifecycle import Deadline
from stopbath.messages import GenerationRequest, GenerationResult

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def engine(*executors: FakeExecutor, restarts: bool = False, **options: Any) -> Engine:
    made = Engine(executors, **options)
    made.watch()
    made.ready(MODEL)
    made.replicas.restarts_with(lambda _name: restarts)
    return made


def ask(made: Engine, request_id: str, **more: Any) -> asyncio.Task[GenerationResult]:
    request = GenerationRequest(
        id=request_id, prompt="a", width=64, height=64, seed=1, num_inference_steps=4,
        guidance_scale=1.0,
    )  # fmt: skip
    by = Deadline.after(60)
    job = made.submit(request, client="c", deadline=by, **more)
    return asyncio.create_task(made.result(job))


async def outcome(task: asyncio.Task[GenerationResult]) -> Any:
    done, _ = await asyncio.wait({task}, timeout=PATIENCE_S)
    assert done, "no answer came"
    return task.exception() or task.result()


def pair() -> tuple[FakeExecutor, FakeExecutor]:
    return FakeExecutor("replica0"), FakeExecutor("replica1")


async def test_work_goes_to_the_least_loaded() -> None:
    one, two = pair()
    made = engine(one, two, capacity=2)
    tasks = [ask(made, str(number)) for number in range(3)]
    assert (len(one.calls), len(two.calls)) == (2, 1)
    one.calls[0].finish()
    assert isinstance(await outcome(tasks[0]), GenerationResult)
    made.stop("over")
    for task in tasks[1:]:
        assert isinstance(await outcome(task), Draining)


async def test_a_loss_fails_what_ran_there_and_moves_what_waits() -> None:
    """The other replica's request never notices; readiness stays."""
    one, two = pair()
    made = engine(one, two)
    lost, kept, waiting = (ask(made, name) for name in ("lost", "kept", "waiting"))
    one.die()
    error = await outcome(lost)
    assert isinstance(error, WorkerLost)
    assert "replica0" in str(error)
    assert "SIGKILL" in str(error)
    assert made.state is EngineState.READY
    two.calls[0].finish()
    assert isinstance(await outcome(kept), GenerationResult)
    await next_call(two)
    (await next_call(two)).finish()
    assert isinstance(await outcome(waiting), GenerationResult)
    views = made.status().replicas
    assert [view.state for view in views] == ["stopped", "ready"]
    assert "SIGKILL" in (views[0].cause or "")
    assert views[1].cause is None


async def test_a_retry_begins_once_on_another_replica() -> None:
    """Before the queue; the second death is the request's end."""
    one, two, three = FakeExecutor("replica0"), FakeExecutor("replica1"), FakeExecutor("replica2")
    made = engine(one, two, three, retry_on_death=True)
    victim, second, third = (ask(made, name) for name in ("victim", "2", "3"))
    behind = ask(made, "behind")
    one.die()
    two.calls[0].finish()
    await outcome(second)
    assert [call.params["id"] for call in two.calls] == ["2", "victim"]
    two.die()
    error = await outcome(victim)
    assert isinstance(error, WorkerLost)
    assert "replica1" in str(error)
    three.calls[0].finish()
    await outcome(third)
    assert [call.params["id"] for call in three.calls] == ["3", "behind"]
    three.calls[1].finish()
    assert isinstance(await outcome(behind), GenerationResult)


async def test_a_client_that_has_heard_of_a_step_is_not_retried() -> None:
    """It would see its request begin twice."""
    one, two = pair()
    made = engine(one, two, retry_on_death=True)
    heard: list[int] = []
    told = ask(made, "told", on_progress=lambda step, _steps: heard.append(step))
    assert one.calls[0].on_progress is not None
    one.calls[0].on_progress(1, 4)
    await asyncio.sleep(0)
    one.die()
    assert isinstance(await outcome(told), WorkerLost)
    assert (heard, two.calls) == ([1], [])


async def test_a_late_word_of_the_lost_replica_reaches_nobody() -> None:
    """Its answer, its progress and its end are of a call that the request has left."""
    one, two = pair()
    made = engine(one, two, retry_on_death=True)
    heard: list[int] = []
    task = ask(made, "moved", on_progress=lambda step, _steps: heard.append(step))
    old = one.calls[0]
    one.cause = KILLED
    for callback in one._callbacks:
        callback(KILLED)
    new = await next_call(two)
    assert old.on_progress is not None
    old.on_progress(3, 4)
    old.finish([b"b2xk"])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    new.finish([b"bmV3"])
    assert (await outcome(task)).images_b64 == [b"bmV3"]
    assert heard == []


async def test_while_the_last_replica_restarts_who_waits_waits() -> None:
    """Not ready meanwhile; new requests are told to come back; then all goes on."""
    one = FakeExecutor("replica0")
    made = engine(one, restarts=True)
    running, waiting = ask(made, "running"), ask(made, "waiting")
    one.die()
    assert isinstance(await outcome(running), WorkerLost)
    assert (made.state, made.status().waiting) == (EngineState.RECOVERING, 1)
    assert made.status().replicas[0].state == "restarting"
    with pytest.raises(Restarting, match="SIGKILL"):
        ask(made, "new")
    again = FakeExecutor("replica0")
    made.replicas.replace("replica0", again)
    made.restore("replica0")
    assert (made.state, made.cause) == (EngineState.READY, None)
    (await next_call(again)).finish()
    assert isinstance(await outcome(waiting), GenerationResult)
    view = made.status().replicas[0]
    assert (view.state, view.restarts) == ("ready", 1)
    assert "SIGKILL" in (view.cause or "")


async def test_the_old_incarnation_cannot_hurt_the_new_one() -> None:
    one = FakeExecutor("replica0")
    made = engine(one, restarts=True)
    one.die()
    await asyncio.sleep(0)
    again = FakeExecutor("replica0", instant=True)
    made.replicas.replace("replica0", again)
    made.restore("replica0")
    one.die()
    await asyncio.sleep(0)
    assert made.state is EngineState.READY
    assert isinstance(await outcome(ask(made, "1")), GenerationResult)


async def test_a_death_between_ready_and_restore_is_heard() -> None:
    one = FakeExecutor("replica0")
    made = engine(one, restarts=True)
    one.die()
    await asyncio.sleep(0)
    again = FakeExecutor("replica0")
    made.replicas.replace("replica0", again)
    again.die()
    made.restore("replica0")
    await asyncio.sleep(0)
    assert made.state is EngineState.RECOVERING


async def test_giving_up_ends_the_wait() -> None:
    """Dead, and everybody who waited hears why."""
    one = FakeExecutor("replica0")
    made = engine(one, restarts=True, retry_on_death=True)
    running, waiting = ask(made, "running"), ask(made, "waiting")
    one.die()
    await asyncio.sleep(0)
    assert made.status().waiting == 2
    made.give_up("replica0", "replica0 could not be restarted")
    for task in (running, waiting):
        assert "could not be restarted" in str(await outcome(task))
    assert made.state is EngineState.DEAD
    await asyncio.wait_for(made.dead(), PATIENCE_S)


async def test_a_drain_waits_for_no_restart() -> None:
    """Who waits for a replica that is not there is told at once."""
    one = FakeExecutor("replica0")
    made = engine(one, restarts=True)
    running, waiting = ask(made, "running"), ask(made, "waiting")
    one.die()
    assert isinstance(await outcome(running), WorkerLost)
    await asyncio.wait_for(made.drain(Deadline.after(60)), PATIENCE_S)
    assert isinstance(await outcome(waiting), Draining)
    made.restore("replica0")
    assert made.state is EngineState.STOPPED
    assert "SIGKILL" in (made.cause or "")


async def test_the_last_replica_dies_in_a_drain_while_another_restarts() -> None:
    one, two = pair()
    made = engine(one, two, restarts=True)
    running = [ask(made, "1"), ask(made, "2")]
    one.die()
    assert isinstance(await outcome(running[0]), WorkerLost)
    draining = asyncio.create_task(made.drain(Deadline.after(60)))
    await asyncio.sleep(0)
    two.die()
    assert isinstance(await outcome(running[1]), EngineError)
    await asyncio.wait_for(draining, PATIENCE_S)
    assert made.state is EngineState.STOPPED


async def test_events_are_told_and_a_slow_listener_is_dropped() -> None:
    one = FakeExecutor("replica0")
    made = engine(one, restarts=True)
    listener, slow = made.events.subscribe(), made.events.subscribe()
    one.die()
    await asyncio.sleep(0)
    made.replicas.replace("replica0", FakeExecutor("replica0"))
    made.restore("replica0")
    made.stop("over")
    told = [event async for event in listener]
    kinds = [(event["event"], event.get("what") or event["state"]) for event in told]
    assert kinds == [
        ("replica", "lost"),
        ("engine", "recovering"),
        ("replica", "starting"),
        ("replica", "restored"),
        ("engine", "ready"),
        ("engine", "stopped"),
    ]
    assert not slow.dropped
    assert [event async for event in made.events.subscribe()] == []


async def test_a_listener_that_does_not_read_costs_a_bounded_buffer() -> None:
    made = engine(FakeExecutor("replica0"))
    slow = made.events.subscribe()
    for number in range(1000):
        made.events.publish("test", number=number)
    assert slow.dropped
    assert len(made.events) == 0
    heard = [event["number"] async for event in slow]
    assert heard == list(range(256))
