"""uvicorn inside our own process control: no signal handlers, no polling, a bounded end."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from stopbath.server.answers import error_body

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from starlette.types import ASGIApp

    from stopbath.lifecycle import Deadline

__all__ = ["HttpServer"]

_HEAD_S = 30.0  # for the head of a request to be complete
_KEEP_ALIVE_S = 65  # longer than the pools of common clients and proxies, which then close first
_LOOK_S = 0.01
_CUT_S = 0.2  # for handlers to notice that their connections were cut at the deadline


class _Connection(H11Protocol):
    """uvicorn's connection, with a time for a request's head, and JSON for what is no HTTP."""

    head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; uvicorn alone would wait for a first request for ever."""
        super().connection_made(transport)
        self._time_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes; a head that only trickles in has no more time than one that never comes."""
        super().data_received(data)
        between = self.cycle is None or self.cycle.response_complete
        if not between:
            self._stop_timer()
        elif self.head_timer is None:
            self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._stop_timer()
        super().connection_lost(exc)

    def _time_head(self) -> None:
        self.head_timer = self.loop.call_later(_HEAD_S, self.timeout_keep_alive_handler)

    def _stop_timer(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, in the shape of every other error."""
        body = msgspec.json.encode(error_body(msg, "invalid_request_error", "bad_http"))
        headers = [("content-type", "application/json"), ("connection", "close")]
        with contextlib.suppress(h11.LocalProtocolError):  # in the middle of another answer
            response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()


class _Uvicorn(uvicorn.Server):
    """uvicorn whose owner decides when it ends."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.leave = asyncio.Event()
        self.by: Deadline | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: uvicorn re-raises them, so that no `finally` would run."""
        yield

    async def main_loop(self) -> None:
        """Wait to be told; uvicorn's own loop wakes ten times a second."""
        await self.leave.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listener, let answers out until the deadline, then cut what is left."""
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        # asyncio has no event for "the last byte is out", hence the looking.
        while (state.connections or state.tasks) and self._time_left():  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        for connection in list(state.connections):
            if isinstance(connection, H11Protocol):
                connection.transport.abort()
        if state.tasks:  # each hears that its client is gone
            await asyncio.wait(set(state.tasks), timeout=_CUT_S)
        for task in list(state.tasks):
            task.cancel()

    def _time_left(self) -> bool:
        return self.by is not None and not self.by.passed


class HttpServer:
    """Serves an application on a listening socket, which it owns from here on."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        self._listener = listener
        options: dict[str, Any] = {
            "http": _Connection,
            "ws": "none",
            "lifespan": "off",
            "loop": "asyncio",
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "date_header": False,  # the envelope sets it; uvicorn's comes from the polling loop
            "proxy_headers": False,
            "timeout_keep_alive": _KEEP_ALIVE_S,
        }
        self._uvicorn = _Uvicorn(uvicorn.Config(app, **options))

    async def serve(self) -> None:
        """Serve until `stop`; ending in any other way is a fault."""
        await self._uvicorn.serve(sockets=[self._listener])

    def stop(self, by: Deadline) -> None:
        """Have `serve` end: no new connections at once, and by `by` no old ones either."""
        if self._uvicorn.by is None or by.at_s < self._uvicorn.by.at_s:
            self._uvicorn.by = by
        self._uvicorn.leave.set()
