"""The application: routes, and every error in OpenAI's shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from stopbath.errors import EngineError, RequestAborted, RequestDuplicate, RequestInvalid
from stopbath.server.answers import ClientError, answer_error
from stopbath.server.envelope import Envelope
from stopbath.server.health import Processes, health_routes
from stopbath.server.metrics import Metrics, metrics_routes
from stopbath.server.routes import client_routes

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from stopbath.config import ServeConfig
    from stopbath.engine.engine import Engine

__all__ = ["create_app"]

_MAPPED = (ClientError, EngineError, RequestAborted, RequestDuplicate, RequestInvalid, Exception)


def create_app(engine: Engine, config: ServeConfig, processes: Processes | None = None) -> ASGIApp:
    """Give the ASGI application that serves `engine`."""
    # No pages of documentation: FastAPI's load their scripts from another host.
    app = FastAPI(title="stopbath", docs_url=None, redoc_url=None, redirect_slashes=False)
    metrics = Metrics(engine)
    app.include_router(client_routes(engine, config, metrics))
    app.include_router(metrics_routes(metrics))
    app.include_router(health_routes(engine, processes or Processes(None, None)))
    for kind in _MAPPED:
        app.add_exception_handler(kind, _answer)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(RequestValidationError, _answer_validation)
    return Envelope(app, engine, config.api_key)


async def _answer(request: Request, error: Exception) -> Response:
    del request
    return answer_error(error)


async def _answer_http(request: Request, error: Exception) -> Response:
    """Answer what the router itself refuses: unknown paths and methods."""
    status, allowed = 500, None
    if isinstance(error, HTTPException):
        status, allowed = error.status_code, error.headers
    path = request.url.path
    if status == 404:  # noqa: PLR2004
        said = ClientError(404, f"there is nothing at {path}", code="unknown_url")
    elif status == 405:  # noqa: PLR2004
        what = f"{request.method} is not allowed at {path}"
        said = ClientError(405, what, code="method_not_allowed", headers=allowed)
    else:
        said = ClientError(status, str(getattr(error, "detail", error)), headers=allowed)
    return answer_error(said)


async def _answer_validation(request: Request, error: Exception) -> Response:
    del request
    return answer_error(ClientError(400, str(error), code="invalid_value"))
