"""The endpoints that clients of the model use."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002  (FastAPI reads the annotations at run time)
from starlette.responses import Response

from stopbath.errors import Overloaded
from stopbath.lifecycle import Deadline
from stopbath.server.answers import ClientError, json_response
from stopbath.server.body import ClientLeft, read_json_body, while_connected
from stopbath.server.pictures import PicturesResponse
from stopbath.server.sse import EventStream, Steps, generation_events, lifecycle_events
from stopbath.server.validation import parse_body, read_priority, read_request

if TYPE_CHECKING:
    from stopbath.config import ServeConfig
    from stopbath.engine.engine import Engine
    from stopbath.server.metrics import Metrics

__all__ = ["client_routes"]

_LISTENERS = 64


def client_routes(engine: Engine, config: ServeConfig, metrics: Metrics) -> APIRouter:
    """Give the routes under /v1 that work on `engine`."""
    router = APIRouter(prefix="/v1", default_response_class=Response)
    model = {
        "id": config.model_name,
        "object": "model",
        "created": int(datetime.now(UTC).timestamp()),
        "owned_by": "stopbath",
    }

    @router.post("/images/generations")
    async def generate(request: Request) -> Response:
        try:
            return await _generate(request, engine, config, metrics)
        except ClientLeft:
            return Response(status_code=499)  # for the log; there is nobody to read it

    @router.delete("/requests/{request_id:path}")
    async def abort(request_id: str) -> Response:
        if not engine.abort(request_id):
            raise ClientError(
                404, f"no request {request_id!r} is being worked on", code="request_not_found"
            )
        return json_response({"id": request_id, "object": "request", "aborted": True})

    @router.get("/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [model]})

    @router.get("/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name != config.model_name:
            raise ClientError(
                404,
                f"the model {name!r} does not exist here",
                code="model_not_found",
                param="model",
            )
        return json_response(model)

    @router.get("/events")
    async def events() -> Response:
        if len(engine.events) >= _LISTENERS:
            raise Overloaded(f"{_LISTENERS} others listen already; try again later")
        heard = engine.events.subscribe()
        parts = lifecycle_events(engine, heard)
        write_s = config.request_s
        return EventStream(parts, write_s=write_s, on_end=lambda: engine.events.unsubscribe(heard))

    return router


async def _generate(
    request: Request, engine: Engine, config: ServeConfig, metrics: Metrics
) -> Response:
    deadline = Deadline.after(config.request_s)
    steps = Steps()
    with metrics.refusals():
        raw = await read_json_body(request, config.max_body_bytes)
        body = parse_body(raw)
        model = engine.check_accepting()
        generation = read_request(body, request.scope["request_id"], model, config)
        job = engine.submit(
            generation,
            client=_client(request, body.user),
            deadline=deadline,
            priority=read_priority(body),
            on_progress=steps.hear if body.stream else None,
        )
    answer = metrics.counted(engine.result(job))
    if body.stream:
        task = asyncio.ensure_future(answer)
        parts = generation_events(task, steps, generation)
        return EventStream(parts, write_s=config.request_s, on_end=task.cancel)
    result = await while_connected(request.receive, answer)
    return PicturesResponse(generation, result, write_s=config.request_s)


def _client(request: Request, user: Any) -> str:
    """Say who takes turns with whom: the end user that a gateway names, else the address."""
    if isinstance(user, str) and user:
        return f"user {user[:200]}"
    return f"host {request.client.host}" if request.client else "unknown"
