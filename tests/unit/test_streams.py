"""Answers that go on: streamed generations, lifecycle events; and what Prometheus reads."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from typing import TYPE_CHECKING, Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fake_executor import FakeExecutor
from fake_server import PATIENCE_S, Served, body, next_call, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx

pytestmark = pytest.mark.anyio
PATH = "/v1/images/generations"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def read_events(response: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Read events as a browser does: name, then data."""
    kind = ""
    async for line in response.aiter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            kind = value
        elif field == "data":
            yield kind, json.loads(value)


async def figures(client: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    """Read /metrics: name and label values, to value."""
    text = (await client.get("/metrics")).text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_a_stream_gives_steps_and_then_every_picture() -> None:
    """The rank's bytes arrive as they were, in as many events as pictures."""
    pictures = [b"one", bytes(range(256)) * 4096]
    async with serving() as served:
        client = served.client()
        sent = body(stream=True, n=2, seed=7, size="64x64")
        async with client.stream("POST", PATH, json=sent) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            events = read_events(response)
            call = await next_call(served.executor)
            assert call.on_progress is not None
            call.on_progress(1, 4)
            kind, progress = await anext(events)
            assert (kind, progress["step"], progress["steps"]) == (
                "image_generation.progress",
                1,
                4,
            )
            call.finish([base64.b64encode(picture) for picture in pictures])
            done = [event async for event in events]
        assert {kind for kind, _ in done} == {"image_generation.completed"}
        assert [base64.b64decode(data["b64_json"]) for _, data in done] == pictures
        assert [(data["index"], data["seed"], data["size"]) for _, data in done] == [
            (0, 7, "64x64"),
            (1, 7, "64x64"),
        ]


async def test_the_official_client_streams() -> None:
    """Steps are events it does not know and passes on; an error is the error it raises."""
    async with (
        serving() as served,
        openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        ) as client,
    ):
        stream = await client.images.generate(prompt="a seven", stream=True)
        call = await next_call(served.executor)
        assert call.on_progress is not None
        call.on_progress(2, 4)
        call.finish([b"QUJD"])
        kinds = {}
        async for event in stream:
            kinds[event.type] = getattr(event, "b64_json", None)
        assert kinds["image_generation.completed"] == "QUJD"
        stream = await client.images.generate(prompt="a seven", stream=True)
        await next_call(served.executor)
        served.executor.die()
        with pytest.raises(openai.APIError, match="SIGKILL"):
            async for _ in stream:
                pass


async def test_a_fault_in_the_middle_is_an_event() -> None:
    async with serving() as served:
        async with served.client().stream("POST", PATH, json=body(stream=True)) as response:
            await next_call(served.executor)
            served.executor.die()
            ((kind, data),) = [event async for event in read_events(response)]
        assert (kind, data["error"]["code"]) == ("error", "worker_died")
        assert "SIGKILL" in data["error"]["message"]


async def test_what_is_refused_is_no_stream() -> None:
    """Before it is accepted a request has an ordinary answer, with a status to retry by."""
    async with serving() as served:
        client = served.client()
        assert (await client.post(PATH, json=body(stream=True, n=99))).status_code == 400
        served.executor.die()
        refused = await client.post(PATH, json=body(stream=True))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "worker_died")


async def test_leaving_a_stream_gives_the_request_up() -> None:
    async with serving() as served:
        client = served.client()
        async with client.stream("POST", PATH, json=body(stream=True)):
            call = await next_call(served.executor)
        assert await asyncio.to_thread(call.cancelled.wait, PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            while (await figures(client)).get(("stopbath_requests_total", "aborted")) != 1:
                pass


async def listen(served: Served, heard: list[dict[str, Any]], begun: asyncio.Event) -> None:
    async with served.client().stream("GET", "/v1/events") as response:
        async for _, data in read_events(response):
            heard.append(data)
            begun.set()


async def test_events_tell_of_replicas_and_end_with_the_engine() -> None:
    """A listener holds up no stop: its stream ends with everything else."""
    heard: list[dict[str, Any]] = []
    begun = asyncio.Event()
    async with serving(FakeExecutor("replica0"), FakeExecutor("replica1")) as served:
        listening = asyncio.create_task(listen(served, heard, begun))
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        served.executors[0].die()
        await asyncio.sleep(0)
        served.executors[1].die()
        await asyncio.sleep(0)
        served.engine.stop("over")
        await asyncio.wait_for(listening, PATIENCE_S)
    told = [(event["event"], event.get("replica") or event["state"]) for event in heard]
    assert told == [
        ("engine", "ready"),
        ("replica", "replica0"),
        ("replica", "replica1"),
        ("engine", "dead"),
        ("engine", "stopped"),
    ]
    assert "SIGKILL" in heard[1]["cause"]


async def test_listeners_are_bounded_and_forgotten_when_they_leave() -> None:
    async with serving() as served, contextlib.AsyncExitStack() as listening:
        client = served.client()
        client.timeout = PATIENCE_S
        for _ in range(64):
            await listening.enter_async_context(served.client().stream("GET", "/v1/events"))
        assert (await client.get("/v1/events")).status_code == 503
        await listening.aclose()
        async with asyncio.timeout(PATIENCE_S):
            while len(served.engine.events):
                await client.get("/health/live")


async def test_metrics_count_requests_by_their_end() -> None:
    """And tell queue, replicas and ranks as they are now."""
    one, two = FakeExecutor("replica0"), FakeExecutor("replica1")
    async with serving(one, two, queue_limit=1) as served:
        client = served.client()
        tasks = [asyncio.create_task(client.post(PATH, json=body())) for _ in range(3)]
        first, _ = await next_call(one), await next_call(two)
        async with asyncio.timeout(PATIENCE_S):
            while (await figures(client))[("stopbath_requests_waiting",)] != 1:
                pass
        assert (await client.post(PATH, json=body())).status_code == 503
        assert (await client.post(PATH, json=body(n=0))).status_code == 400
        now = await figures(client)
        assert now[("stopbath_requests_running",)] == 2
        assert now[("stopbath_ready",)] == 1
        assert now[("stopbath_ranks_alive", "replica0")] == 1
        assert now[("stopbath_replica_state", "replica1", "ready")] == 1
        assert now[("stopbath_replica_restarts_total", "replica0")] == 0
        first.finish()
        (await next_call(one)).finish()
        two.die()
        await asyncio.wait(tasks, timeout=PATIENCE_S)
        now = await figures(client)
        outcomes = {key[1]: n for key, n in now.items() if key[0] == "stopbath_requests_total"}
        assert outcomes == {"ok": 2, "worker_died": 1, "overloaded": 1, "invalid": 1}
        assert now[("stopbath_request_seconds_count",)] == 2
        assert now[("stopbath_unfinished_requests_total",)] == 1


async def test_two_applications_count_apart() -> None:
    async with serving(FakeExecutor(instant=True)) as one, serving() as other:
        await one.client().post(PATH, json=body())
        assert (await figures(one.client()))[("stopbath_requests_total", "ok")] == 1
        assert ("stopbath_requests_total", "ok") not in await figures(other.client())


async def test_a_higher_priority_goes_first() -> None:
    async with serving() as served:
        client = served.client()
        tasks = []
        for waiting, priority in enumerate((0, -1, 10)):
            sent = body(prompt=f"p{priority}", priority=priority)
            tasks.append(asyncio.create_task(client.post(PATH, json=sent)))
            async with asyncio.timeout(PATIENCE_S):
                while (await figures(client))[("stopbath_requests_waiting",)] != waiting:
                    pass
        for _ in tasks:
            (await next_call(served.executor)).finish()
        await asyncio.wait(tasks, timeout=PATIENCE_S)
        assert [call.params["prompt"] for call in served.executor.calls] == ["p0", "p10", "p-1"]
