"""What holds for every request: its id, the key, the last word on errors, one line in the log."""

from __future__ import annotations

import hmac
import re
import time
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import TYPE_CHECKING
from uuid import uuid4

import structlog
from starlette.datastructures import Headers, MutableHeaders

from stopbath.engine.state import EngineState
from stopbath.server.answers import ClientError, answer_error
from stopbath.server.health import HEALTH_PATHS

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from stopbath.engine.engine import Engine

__all__ = ["Envelope"]

_log = structlog.get_logger("stopbath.http")
_ID = re.compile(r"[!-~]{1,128}")  # visible ASCII: it goes into a header, a path and the log


class Envelope:
    """ASGI layer around the application.

    While the engine stops, every answer says `Connection: close`, so that no keep-alive
    connection brings requests to a server that will refuse them.
    """

    def __init__(self, app: ASGIApp, engine: Engine, api_key: str) -> None:
        self._app = app
        self._engine = engine
        self._key = api_key.encode() if api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; an exception inside becomes an answer, or ends the connection."""
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served here, not {scope['type']}")
        began = time.monotonic()
        headers = Headers(scope=scope)
        request_id = _usable(headers.get("x-request-id")) or f"img-{uuid4().hex}"
        scope["request_id"] = request_id
        status: int | None = None
        complete = False

        async def send_wrapped(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                self._complete(MutableHeaders(scope=message), request_id)
            else:
                complete = not message.get("more_body", False)
            await send(message)

        try:
            _check_id(headers)
            self._check_key(scope["path"], headers)
            await self._app(scope, receive, send_wrapped)
        except Exception as error:
            if status is not None and not complete:
                raise  # half an answer is out: all that is left is to end the connection
            if not isinstance(error, ClientError):
                _log.exception("request failed", request_id=request_id)
            if status is None:
                await answer_error(error)(scope, receive, send_wrapped)
        finally:
            _log_line(scope, status, request_id, time.monotonic() - began)

    def _complete(self, headers: MutableHeaders, request_id: str) -> None:
        headers["x-request-id"] = request_id
        headers["date"] = format_datetime(datetime.now(UTC), usegmt=True)
        if self._engine.state in {EngineState.DRAINING, EngineState.STOPPED}:
            headers["connection"] = "close"

    def _check_key(self, path: str, headers: Headers) -> None:
        if self._key is None or path in HEALTH_PATHS:
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # Headers are read as latin-1, which gives back the bytes that the client sent.
        same = hmac.compare_digest(token.strip().encode("latin-1"), self._key)
        if scheme.lower() != "bearer" or not same:
            raise ClientError(
                401,
                "the API key is missing or wrong: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


def _usable(given: str | None) -> str | None:
    return given if given is not None and _ID.fullmatch(given) else None


def _check_id(headers: Headers) -> None:
    given = headers.get("x-request-id")
    if given is not None and _usable(given) is None:
        raise ClientError(
            400,
            "x-request-id must be 1 to 128 visible ASCII characters",
            code="invalid_value",
            param="x-request-id",
        )


def _log_line(scope: Scope, status: int | None, request_id: str, seconds: float) -> None:
    """Log what changes something or went wrong on our side; probes and readers stay silent."""
    failed = status is None or status >= 500  # noqa: PLR2004
    if scope["path"] in HEALTH_PATHS or (scope["method"] in {"GET", "HEAD"} and not failed):
        return
    _log.info(
        "request",
        method=scope["method"],
        path=scope["path"][:200],
        status=status,
        ms=round(seconds * 1000, 1),
        request_id=request_id,
    )
