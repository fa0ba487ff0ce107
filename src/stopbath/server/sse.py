"""Answers that go on: server-sent events, with back-pressure and an end for every one of them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.responses import Response

from stopbath.server.answers import answer_error
from stopbath.server.body import ClientLeft, while_connected

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from starlette.types import Receive, Scope, Send

    from stopbath.engine.engine import Engine
    from stopbath.engine.events import Subscription
    from stopbath.messages import GenerationRequest, GenerationResult

__all__ = ["EventStream", "Steps", "generation_events", "lifecycle_events"]

_CHUNK: Final = 256 << 10  # joining more at once would hold the interpreter for milliseconds


def event(kind: str, data: Any) -> bytes:
    """Encode one event."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(data))


class EventStream(Response):
    """`text/event-stream` from the bytes that an iterator gives.

    A client that does not take an event within `write_s` seconds is given up; one that leaves
    ends the iterator. `on_end` is called in every case, also when not a byte went out.
    """

    media_type = "text/event-stream"

    def __init__(
        self, parts: AsyncGenerator[bytes, None], *, write_s: float, on_end: Callable[[], object]
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._parts = parts
        self._write_s = write_s
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; `TimeoutError` when the client does not read."""
        del scope
        try:
            await while_connected(receive, self._send_all(send))
        except ClientLeft:
            return  # there is nobody to send the rest to
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._parts):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for part in self._parts:
                async with asyncio.timeout(self._write_s):
                    for start in range(0, len(part), _CHUNK):
                        chunk = part[start : start + _CHUNK]
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


class Steps:
    """The newest step of a request; older ones that nobody has read yet are forgotten."""

    def __init__(self) -> None:
        self._newest: tuple[int, int] | None = None
        self.changed = asyncio.Event()

    def hear(self, step: int, steps: int) -> None:
        """Note a step; on the loop."""
        self._newest = (step, steps)
        self.changed.set()

    def take(self) -> tuple[int, int] | None:
        """Give the newest step, once."""
        newest, self._newest = self._newest, None
        self.changed.clear()
        return newest


async def generation_events(
    answer: asyncio.Future[GenerationResult], steps: Steps, request: GenerationRequest
) -> AsyncGenerator[bytes, None]:
    """Give progress, then the pictures or the error of an accepted request.

    OpenAI's names where there are any; `image_generation.progress` is ours.
    """
    while not answer.done():
        stepped = asyncio.ensure_future(steps.changed.wait())
        either: set[asyncio.Future[Any]] = {answer, stepped}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stepped.cancel()
        newest = steps.take()
        if newest is not None:
            kind = "image_generation.progress"
            yield event(kind, {"type": kind, "step": newest[0], "steps": newest[1]})
    try:
        result = answer.result()
    except Exception as error:  # noqa: BLE001  (whatever it is, the client must hear of it)
        yield b"event: error\ndata: %b\n\n" % bytes(answer_error(error).body)
        return
    for part in _completed(request, result):
        yield part


def _completed(request: GenerationRequest, result: GenerationResult) -> Iterator[bytes]:
    """Give one event for each picture, whose bytes go out as they came."""
    kind = "image_generation.completed"
    about = {
        "type": kind,
        "created_at": int(datetime.now(UTC).timestamp()),
        "size": f"{request.width}x{request.height}",
        "output_format": request.output_format,
        "quality": "auto",
        "background": "opaque",
        "seed": request.seed,
        "seconds": result.seconds,
    }
    for index, image in enumerate(result.images_b64):
        head = msgspec.json.encode({**about, "index": index})[:-1]
        yield b"event: %b\ndata: %b" % (kind.encode(), head) + b',"b64_json":"'
        yield image
        yield b'"}\n\n'


async def lifecycle_events(engine: Engine, heard: Subscription) -> AsyncGenerator[bytes, None]:
    """Give what happens to engine and replicas, the present state first."""
    yield event("engine", {"event": "engine", "state": engine.state.value})
    async for one in heard:
        yield event(one["event"], one)
