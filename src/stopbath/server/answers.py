"""Everything a client hears except pictures: JSON in OpenAI's shapes, errors mapped once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from stopbath.errors import EngineError, RequestAborted, RequestDuplicate, RequestInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "BodyTooLarge",
    "ClientError",
    "answer_error",
    "error_body",
    "json_response",
]

_INVALID = "invalid_request_error"


class ClientError(Exception):
    """The request cannot be served as it was sent; `status` is an HTTP status below 500."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = dict(headers or {})


class BodyTooLarge(ClientError):
    """The body is over the limit; what is left of it is not worth reading."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            413,
            f"the request body is larger than {limit} bytes",
            code="body_too_large",
            headers={"connection": "close"},
        )


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Encode `value` (builtins or structs) as a JSON response."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def error_body(
    message: str, kind: str, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """Give an error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def answer_error(error: Exception) -> Response:
    """Give the response that says `error`; one that nobody expected is told without details."""
    headers: dict[str, str] = {}
    match error:
        case EngineError():
            if error.retry_after_s is not None:
                headers["retry-after"] = str(error.retry_after_s)
            body = error_body(str(error), "engine_error", error.code)
            status = error.status
        case ClientError():
            body = error_body(str(error), _INVALID, error.code, error.param)
            status, headers = error.status, error.headers
        case RequestInvalid():
            body = error_body(str(error), _INVALID, "invalid_value", error.param)
            status = 400
        case RequestDuplicate():
            body = error_body(str(error), _INVALID, "duplicate_request_id")
            status = 409
        case RequestAborted():
            # 499 is nginx's "client closed request"; unlike 409 no client library retries it.
            body = error_body(str(error), _INVALID, "request_aborted")
            status = 499
        case _:
            body = error_body("the server made an error; its log says more", "server_error")
            status = 500
    return json_response(body, status, headers)
