"""The real HTTP server: clients that leave, limits, drain, faults."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from typing import Any

import httpx
import openai
import pytest

from fake_executor import FakeExecutor
from fake_server import PATIENCE_S, Served, body, next_call, serving
from stopbath.lifecycle import Deadline

pytestmark = pytest.mark.anyio
PATH = "/v1/images/generations"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def client_of(served: Served, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S, **options
    )


async def queued(client: httpx.AsyncClient, **counts: int) -> None:
    """Wait for requests that are on their way through the sockets."""
    async with asyncio.timeout(PATIENCE_S):
        while (await client.get("/v1/status")).json()["queue"] != counts:
            pass


async def test_the_official_client_gets_its_pictures() -> None:
    """What the rank encoded arrives byte for byte, also when it is megabytes."""
    pictures = [b"one", bytes(range(256)) * 8192]
    async with serving(served_name="digits") as served, client_of(served) as client:
        task = asyncio.create_task(
            client.images.generate(
                prompt="a seven", model="digits", n=2, size="64x64", quality="hd", user="u"
            )
        )
        call = await next_call(served.executor)
        call.finish([base64.b64encode(picture) for picture in pictures])
        answer = await task
        assert [base64.b64decode(it.b64_json or "") for it in answer.data or []] == pictures
        assert answer.created > 0
        assert [model.id async for model in client.models.list()] == ["digits"]


async def test_the_official_client_understands_the_errors() -> None:
    """Errors raise the classes that users of the client already handle."""
    async with serving() as served, client_of(served) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.images.generate(prompt="")
        assert bad.value.param == "prompt"
        with pytest.raises(openai.NotFoundError):
            await client.images.generate(prompt="a", model="dall-e-3")


async def test_a_client_that_leaves_aborts_its_request_and_no_other() -> None:
    """A closed connection reaches the rank as a cancel, while the generation runs."""
    async with serving(queue_limit=2) as served:
        leaver, stayer = served.client(), served.client()
        leaving = asyncio.create_task(leaver.post(PATH, json=body()))
        call = await next_call(served.executor)
        staying = asyncio.create_task(stayer.post(PATH, json=body()))
        leaving.cancel()
        await asyncio.wait({leaving}, timeout=PATIENCE_S)
        assert await asyncio.to_thread(call.cancelled.wait, PATIENCE_S)
        second = await next_call(served.executor)
        second.finish()
        assert (await staying).status_code == 200
        assert not second.cancelled.is_set()


async def test_a_request_is_deleted_by_its_id() -> None:
    """The client that waits for it hears of it, nobody else does; a second delete misses."""
    async with serving() as served:
        client = served.client()
        asked = asyncio.create_task(
            client.post(PATH, json=body(), headers={"x-request-id": "mine/1"})
        )
        call = await next_call(served.executor)
        other = asyncio.create_task(client.post(PATH, json=body()))
        await queued(client, waiting=1, running=1)
        deleted = await client.delete("/v1/requests/mine/1")
        assert deleted.json() == {"id": "mine/1", "object": "request", "aborted": True}
        answer = await asked
        assert (answer.status_code, answer.json()["error"]["code"]) == (499, "request_aborted")
        assert answer.headers["x-request-id"] == "mine/1"
        assert call.cancelled.is_set()
        assert (await client.delete("/v1/requests/mine/1")).status_code == 404
        (await next_call(served.executor)).finish()
        assert (await other).status_code == 200


async def test_a_lost_worker_is_told_to_every_client() -> None:
    """503 with worker and signal for who runs and who waits; health says so at once."""
    async with serving() as served:
        client = served.client()
        running = asyncio.create_task(client.post(PATH, json=body()))
        await next_call(served.executor)
        waiting = asyncio.create_task(client.post(PATH, json=body()))
        assert (await client.get("/health/ready")).status_code == 200
        await queued(client, waiting=1, running=1)
        served.executor.die()
        for response in (await running, await waiting, await client.post(PATH, json=body())):
            error = response.json()["error"]
            assert response.status_code == 503
            assert (error["type"], error["code"]) == ("engine_error", "worker_died")
            assert "rank1" in error["message"]
            assert "SIGKILL" in error["message"]
        ready = await client.get("/health/ready")
        assert (ready.status_code, (await client.get("/health")).status_code) == (503, 503)
        assert "SIGKILL" in ready.json()["cause"]
        assert (await client.get("/health/live")).status_code == 200
        status = (await client.get("/v1/status")).json()
        assert (status["state"], status["replicas"][0]["state"]) == ("dead", "stopped")
        assert "SIGKILL" in status["cause"]
        assert "SIGKILL" in status["replicas"][0]["cause"]


async def test_a_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    """Ready is 503 first; the running request is finished; keep-alive connections are closed."""
    async with serving() as served:
        busy, other = served.client(), served.client()
        running = asyncio.create_task(busy.post(PATH, json=body()))
        call = await next_call(served.executor)
        assert "connection" not in (await other.get("/health/ready")).headers
        draining = asyncio.create_task(served.engine.drain(Deadline.after(PATIENCE_S)))
        await asyncio.sleep(0)
        ready = await other.get("/health/ready")
        assert (ready.status_code, ready.headers["connection"]) == (503, "close")
        refused = await other.post(PATH, json=body())
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert int(refused.headers["retry-after"]) > 0
        assert refused.headers["connection"] == "close"
        call.finish()
        answer = await running
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        await asyncio.wait_for(draining, PATIENCE_S)


async def test_a_drain_deadline_answers_the_rest() -> None:
    """Who runs too long hears "deadline", who waits "draining"; nobody is left without answer."""
    async with serving(FakeExecutor(slow_cancel=True)) as served:
        client = served.client()
        running = asyncio.create_task(client.post(PATH, json=body()))
        await next_call(served.executor)
        waiting = asyncio.create_task(client.post(PATH, json=body()))
        await queued(client, waiting=1, running=1)
        await served.engine.drain(Deadline.after(0.05))
        codes = [(await it).json()["error"]["code"] for it in (running, waiting)]
        assert codes == ["deadline", "draining"]


async def test_stopping_is_bounded_by_its_deadline() -> None:
    """A client in the middle of its request cannot hold the server."""
    async with serving() as served:
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/images/generations HTTP/1.1\r\nhost: x\r\n"
                     b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{")  # fmt: skip
        await writer.drain()
        # The answer to a later request: by now the earlier bytes have been read.
        assert (await served.client().get("/health")).status_code == 200
        served.http.stop(Deadline.after(0.2))
        async with asyncio.timeout(2):
            with contextlib.suppress(ConnectionError):  # cut: a reset, or an end without answer
                assert await reader.read() == b""
        writer.close()


async def chunks(size: int, total: int) -> Any:
    for _ in range(0, total, size):
        yield b"x" * size


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [5000, 200_000])
async def test_a_body_over_the_limit(size: int, chunked: bool) -> None:  # noqa: FBT001
    """The limit holds with and without a content-length, and the client hears of it."""
    async with serving(max_body_bytes=4096) as served:
        content = chunks(1000, size) if chunked else b"x" * size
        answer = await served.client().post(
            PATH, content=content, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"


async def test_an_endless_body_is_cut() -> None:
    """A client that never stops sending costs neither memory nor time."""
    async with serving(max_body_bytes=4096) as served:
        request = served.client().post(
            PATH, content=chunks(1 << 16, 1 << 34), headers={"content-type": "application/json"}
        )
        with contextlib.suppress(httpx.WriteError, httpx.ReadError):  # cut while still sending
            assert (await asyncio.wait_for(request, PATIENCE_S)).status_code == 413


async def test_a_chunked_body_under_the_limit_is_served() -> None:
    """Chunks that the network cuts anywhere make one request."""
    raw = json.dumps(body()).encode()

    async def pieces() -> Any:
        for start in range(0, len(raw), 3):
            yield raw[start : start + 3]

    async with serving(FakeExecutor(instant=True)) as served:
        answer = await served.client().post(
            PATH, content=pieces(), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 200


async def test_what_is_not_http_gets_an_error_of_the_usual_shape() -> None:
    """Even the parser's refusal is JSON."""
    async with serving() as served:
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\x16\x03\x01 this is TLS\r\n\r\n")
        raw = await asyncio.wait_for(reader.read(), PATIENCE_S)
        head, _, said = raw.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(said)["error"]["code"] == "bad_http"
        writer.close()


@pytest.mark.parametrize("first", [b"", b"GET /health HT"])
async def test_a_head_that_never_ends_is_cut(first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that ask for nothing do not pile up."""
    monkeypatch.setattr("stopbath.server.serving._HEAD_S", 0.05)
    async with serving() as served:
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(first)
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        writer.close()


async def test_a_request_outlives_the_time_for_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the head is timed, not the work."""
    monkeypatch.setattr("stopbath.server.serving._HEAD_S", 0.05)
    async with serving() as served:
        asked = asyncio.create_task(served.client().post(PATH, json=body()))
        call = await next_call(served.executor)
        await asyncio.sleep(0.15)  # the time passes, and nothing happens
        call.finish()
        assert (await asked).status_code == 200


async def test_status_has_its_published_shape() -> None:
    """Outside tools read these names."""
    async with serving() as served:
        status = (await served.client().get("/v1/status")).json()
    assert set(status) == {
        "state", "guardian_pid", "keeper_pid", "server_pid", "cause", "queue", "replicas",
    }  # fmt: skip
    assert status["replicas"] == [
        {
            "name": "replica0", "role": "monolithic", "state": "ready", "restarts": 0,
            "cause": None,
            "ranks": [
                {"name": "rank0", "rank": 0, "pid": 1234, "state": "ready", "last_progress_s": 0.5}
            ],
        }
    ]  # fmt: skip
