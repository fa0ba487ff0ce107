"""What probes and operators ask: alive, ready, and how everything is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.responses import Response

from stopbath.engine.state import EngineState
from stopbath.errors import EngineError
from stopbath.server.answers import error_body, json_response

if TYPE_CHECKING:
    from stopbath.engine.engine import Engine
    from stopbath.engine.replica import ReplicaView

__all__ = ["HEALTH_PATHS", "Processes", "health_routes"]

HEALTH_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
"""Open without a key, and never logged: probes have none and come every second."""


@dataclass(frozen=True, slots=True)
class Processes:
    """The pids that `/v1/status` shows, in the caller's namespace."""

    guardian_pid: int | None
    keeper_pid: int | None


def health_routes(engine: Engine, processes: Processes) -> APIRouter:
    """Give the routes that read `engine` and ask nobody."""
    router = APIRouter(default_response_class=Response)

    @router.api_route("/health/live", methods=["GET", "HEAD"])
    async def live() -> Response:
        return json_response({"status": "alive"})

    @router.api_route("/health", methods=["GET", "HEAD"])
    @router.api_route("/health/ready", methods=["GET", "HEAD"])
    async def ready() -> Response:
        return _readiness(engine)

    @router.get("/v1/status")
    async def status() -> Response:
        now = engine.status()
        return json_response(
            {
                "state": now.state.value,
                "guardian_pid": processes.guardian_pid,
                "keeper_pid": processes.keeper_pid,
                "server_pid": os.getpid(),
                "cause": now.cause,
                "queue": {"waiting": now.waiting, "running": now.running},
                "replicas": [_replica(replica) for replica in now.replicas],
            }
        )

    return router


def _readiness(engine: Engine) -> Response:
    if engine.state is EngineState.READY:
        return json_response({"status": "ready", "state": engine.state.value})
    try:
        engine.check_accepting()
    except EngineError as error:
        said = error_body(str(error), "engine_error", error.code)
        wait = error.retry_after_s
    answer = {"status": "not ready", "state": engine.state.value, "cause": engine.cause, **said}
    return json_response(answer, 503, {} if wait is None else {"retry-after": str(wait)})


def _replica(replica: ReplicaView) -> dict[str, Any]:
    return {
        "name": replica.name,
        "role": "monolithic",
        "state": replica.state,
        "restarts": replica.restarts,
        "cause": replica.cause,
        "ranks": [
            {
                "name": rank.name,
                "rank": rank.rank,
                "pid": rank.pid,
                "state": rank.state.value,
                "last_progress_s": rank.last_progress_s,
            }
            for rank in replica.now.ranks
        ],
    }
