"""Reading a request body within a limit and a time, and noticing that the client left."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from stopbath.server.answers import BodyTooLarge, ClientError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from starlette.requests import Request
    from starlette.types import Receive

__all__ = ["ClientLeft", "read_json_body", "while_connected"]

_BODY_S = 30.0  # for a body that trickles in
_LINGER_BYTES = 8 << 20  # closing on unread bytes resets the connection and loses the answer


class ClientLeft(Exception):
    """The client closed the connection: there is nobody to answer."""


async def read_json_body(request: Request, limit: int) -> bytes:
    """Read the whole body, chunked or not.

    Raises `BodyTooLarge`, `ClientError` 408 or 415, or `ClientLeft`.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also keeps other sites' pages from posting here: a browser asks before sending JSON.
        raise ClientError(
            415, "the content-type must be application/json", code="unsupported_media_type"
        )
    try:
        async with asyncio.timeout(_BODY_S):
            return await _read(request.receive, limit, _announced(request))
    except TimeoutError:
        raise ClientError(
            408,
            f"the request body did not arrive within {_BODY_S:g} s",
            code="body_timeout",
            headers={"connection": "close"},
        ) from None


def _announced(request: Request) -> int:
    length = request.headers.get("content-length", "0")
    return int(length) if length.isascii() and length.isdigit() else 0


async def _read(receive: Receive, limit: int, announced: int) -> bytes:
    if announced > _LINGER_BYTES:
        raise BodyTooLarge(limit)
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        part: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(part)
        if size > _LINGER_BYTES:
            break
        if size <= limit:
            parts.append(part)
        else:
            parts.clear()  # only read on so that the client can hear the answer
    if size > limit:
        raise BodyTooLarge(limit)
    return b"".join(parts)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """Do `work` unless the client leaves first: then it is cancelled and `ClientLeft` raised.

    The body must have been read. What is still running when this is cancelled is cancelled too.
    """
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientLeft
        return doing.result()
    finally:
        leaving.cancel()
        doing.cancel()
        # Both end in this turn or the next: neither waits for anything once it is cancelled.
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
