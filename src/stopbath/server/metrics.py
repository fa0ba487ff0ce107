"""What Prometheus reads: counted as it happens, or read from the engine's state when asked."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.responses import Response

from stopbath.engine.state import EngineState
from stopbath.errors import EngineError, RequestAborted, RequestDuplicate, RequestInvalid
from stopbath.server.answers import ClientError
from stopbath.server.body import ClientLeft

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from prometheus_client.core import Metric

    from stopbath.engine.engine import Engine

__all__ = ["Metrics", "metrics_routes"]

T = TypeVar("T")

_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_ENDED: Final = frozenset({"exited", "gone", "created"})


class Metrics(Collector):
    """The figures of one application, in a registry of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.registry = CollectorRegistry(auto_describe=False)
        self._requests = Counter(
            "stopbath_requests", "Requests by how they ended.", ["outcome"], registry=self.registry
        )
        self._seconds = Histogram(
            "stopbath_request_seconds",
            "From acceptance to the answer, of requests that got their pictures.",
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self.registry.register(self)

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Count a request that is not accepted, by why."""
        try:
            yield
        except Exception as error:
            self._requests.labels(_outcome(error)).inc()
            raise

    async def counted(self, result: Coroutine[Any, Any, T]) -> T:
        """Await the answer of an accepted request, and count how it ended."""
        began_s = time.monotonic()
        try:
            answer = await result
        except BaseException as error:
            self._requests.labels(_outcome(error)).inc()
            raise
        self._requests.labels("ok").inc()
        self._seconds.observe(time.monotonic() - began_s)
        return answer

    def collect(self) -> Iterator[Metric]:
        """Read the engine's state, once for all gauges; asks nobody."""
        now = self._engine.status()
        ready = float(now.state is EngineState.READY)
        yield GaugeMetricFamily("stopbath_ready", "Whether requests are accepted.", ready)
        yield GaugeMetricFamily("stopbath_requests_waiting", "Requests in the queue.", now.waiting)
        yield GaugeMetricFamily("stopbath_requests_running", "Requests at work.", now.running)
        unfinished = "Requests that a fault or a stop ended."
        yield CounterMetricFamily(
            "stopbath_unfinished_requests", unfinished, self._engine.unfinished
        )
        states = GaugeMetricFamily(
            "stopbath_replica_state",
            "1 for the state a replica is in.",
            labels=["replica", "state"],
        )
        restarts = CounterMetricFamily(
            "stopbath_replica_restarts", "Restarts of a replica.", labels=["replica"]
        )
        alive = GaugeMetricFamily(
            "stopbath_ranks_alive", "Rank processes that live.", labels=["replica"]
        )
        for replica in now.replicas:
            living = [rank for rank in replica.now.ranks if rank.state.value not in _ENDED]
            states.add_metric([replica.name, replica.state], 1)
            restarts.add_metric([replica.name], replica.restarts)
            alive.add_metric([replica.name], len(living))
        yield from (states, restarts, alive)


def metrics_routes(metrics: Metrics) -> APIRouter:
    """Give the route that Prometheus scrapes."""
    router = APIRouter(default_response_class=Response)

    @router.get("/metrics")
    async def scrape() -> Response:
        return Response(
            generate_latest(metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST}
        )

    return router


def _outcome(error: BaseException) -> str:
    match error:
        case EngineError():
            return error.code
        case RequestAborted() | ClientLeft() | asyncio.CancelledError():
            return "aborted"
        case RequestInvalid() | RequestDuplicate() | ClientError():
            return "invalid"
        case _:
            return "internal"
