"""The engine and the real HTTP server on a free port, over replicas without processes."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from fake_executor import MODEL, FakeExecutor
from stopbath.config import ServeConfig
from stopbath.engine.engine import Engine
from stopbath.lifecycle import Deadline
from stopbath.server.app import create_app
from stopbath.server.listener import listen, url_of
from stopbath.server.serving import HttpServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fake_executor import FakeCall

PATIENCE_S = 10.0
"""What a test waits for something that should come at once."""


@dataclass
class Served:
    """A server that runs in this loop."""

    url: str
    engine: Engine
    http: HttpServer
    executors: list[FakeExecutor]
    clients: list[httpx.AsyncClient] = field(default_factory=list)

    @property
    def executor(self) -> FakeExecutor:
        """The first replica."""
        return self.executors[0]

    def client(self, **headers: str) -> httpx.AsyncClient:
        """Give a client with connections of its own."""
        made = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=PATIENCE_S)
        self.clients.append(made)
        return made


async def next_call(executor: FakeExecutor) -> FakeCall:
    """Wait until the replica is asked for something more; give the newest call."""
    acquired = await asyncio.to_thread(executor.called.acquire, timeout=PATIENCE_S)
    assert acquired, "the replica was not called"
    return executor.calls[-1]


def body(**fields: Any) -> dict[str, Any]:
    """Give the body of a good request, with `fields` laid over it."""
    return {"prompt": "a seven", **fields}


@asynccontextmanager
async def serving(*executors: FakeExecutor, **config: Any) -> AsyncIterator[Served]:
    """Serve until the block ends; then the server must end as well."""
    settings = ServeConfig(port=0, **config)
    listener = listen(settings.host, settings.port)
    replicas = list(executors) or [FakeExecutor()]
    engine = Engine(replicas, queue_limit=settings.queue_limit)
    engine.watch()
    engine.ready(MODEL)
    http = HttpServer(create_app(engine, settings), listener)
    served = Served(url_of(listener), engine, http, replicas)
    running = asyncio.create_task(http.serve())
    try:
        yield served
    finally:
        engine.stop("the test is over")
        http.stop(Deadline.after(1))
        for client in served.clients:
            await client.aclose()
        await asyncio.wait_for(running, PATIENCE_S)
