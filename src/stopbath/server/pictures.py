"""The answer with the pictures, put together from bytes that are base64 already."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import Receive, Scope, Send

    from stopbath.messages import GenerationRequest, GenerationResult

__all__ = ["PicturesResponse"]

_CHUNK = 256 << 10  # joining more at once would hold the interpreter for milliseconds


class PicturesResponse(Response):
    """`{"created", "data": [{"b64_json", "seed"}], …}` without a second encoding.

    Megabytes of base64 through a JSON encoder would hold the interpreter, and with it the
    notice of a rank's death. The pictures go out as they came, in chunks, with back-pressure;
    a client that does not read them within `write_s` seconds is given up.
    """

    def __init__(
        self, request: GenerationRequest, result: GenerationResult, write_s: float
    ) -> None:
        super().__init__(media_type="application/json")
        self._parts = list(_parts(request, result))
        self._write_s = write_s
        self.headers["content-length"] = str(sum(len(part) for part in self._parts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; `TimeoutError` when the client does not read."""
        del scope, receive
        async with asyncio.timeout(self._write_s):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            for chunk in self._chunks():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    def _chunks(self) -> Iterator[bytes]:
        for part in self._parts:
            for start in range(0, len(part), _CHUNK):
                yield part[start : start + _CHUNK]


def _parts(request: GenerationRequest, result: GenerationResult) -> Iterator[bytes]:
    created = int(datetime.now(UTC).timestamp())
    yield b'{"created":%d,"data":[' % created
    for number, image in enumerate(result.images_b64):
        yield (b"," if number else b"") + b'{"b64_json":"'
        yield image
        yield b'","seed":%d}' % request.seed
    size = f"{request.width}x{request.height}"
    tail = {"output_format": request.output_format, "seed": request.seed, "size": size}
    yield b"]," + msgspec.json.encode({**tail, "seconds": result.seconds})[1:]
