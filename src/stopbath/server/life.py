"""The server's life: start, serve, drain, stop. Every way through it ends in `_end`."""

from __future__ import annotations

import asyncio
import traceback
from typing import TYPE_CHECKING, Any

from stopbath.engine.engine import Engine
from stopbath.engine.fleet import NotAllReady
from stopbath.lifecycle import Action, Deadline, StartupError
from stopbath.server.app import create_app
from stopbath.server.exits import Ending
from stopbath.server.health import Processes
from stopbath.server.listener import url_of
from stopbath.server.serving import HttpServer

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    from stopbath.config import ServeConfig
    from stopbath.engine.fleet import Fleet
    from stopbath.lifecycle import ShutdownReport
    from stopbath.messages import ModelInfo
    from stopbath.server.context import ServerContext
    from stopbath.server.stops import Stops

__all__ = ["MARGIN_S", "Life"]

MARGIN_S = 1.0
"""What the server keeps of a stop's budget for the last answers and the report."""

_FLUSH_S = 0.3  # for answers that are made to reach clients, when there is no drain to finish in
_KEPT_LINES = 8
_LAST_WORDS_S = 5.0  # for a failed start to say why, once a rank is known to be lost


class Life:
    """One server over its replicas, from the first connection to the account of its stop."""

    def __init__(
        self,
        ctx: ServerContext,
        config: ServeConfig,
        *,
        listener: socket.socket,
        fleet: Fleet,
        stops: Stops,
        say: Callable[[str], None],
    ) -> None:
        self._ctx, self._config, self._fleet = ctx, config, fleet
        self._stops, self._say = stops, say
        self._url = url_of(listener)
        self._engine = Engine(
            fleet.executors,
            queue_limit=config.queue_limit,
            capacity=config.capacity,
            preempts=config.preempts,
            retry_on_death=config.retry_on_death,
        )
        fleet.serve(self._engine)
        processes = Processes(ctx.guardian_pid, ctx.keeper_pid)
        self._http = HttpServer(create_app(self._engine, config, processes), listener)
        self._graces_s = config.terminate_s + config.kill_s
        self._was_ready = False

    async def run(self) -> set[Ending]:
        """Live; give what the end was."""
        self._stops.attach()
        self._engine.watch()
        http = asyncio.create_task(self._http.serve(), name="http")
        endings = await self._live(http)
        endings |= await self._end(http)
        if self._was_ready and self._engine.cause is not None:
            endings.add(Ending.ENGINE_DEAD)
        return endings

    async def _live(self, http: asyncio.Task[None]) -> set[Ending]:
        """Start and serve, until there is a reason to end."""
        asked = asyncio.create_task(self._stops.asked(), name="asked")
        dead = asyncio.create_task(self._engine.dead(), name="dead")
        starting = self._fleet.start()
        ends: list[asyncio.Future[Any]] = [http, asked]
        try:
            await asyncio.wait([*ends, starting, dead], return_when=asyncio.FIRST_COMPLETED)
            if not (http.done() or asked.done()):
                if not starting.done():  # dead: the start should be telling why any moment now
                    await asyncio.wait(
                        [*ends, starting],
                        timeout=_LAST_WORDS_S,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                problem = self._started(starting)
                if problem is not None:
                    return {problem}
                if self._config.on_engine_death != "hold":
                    ends.append(dead)
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return {Ending.ERROR} if http.done() else ({Ending.ASKED} if asked.done() else set())
        finally:
            asked.cancel()
            dead.cancel()

    def _started(self, starting: asyncio.Future[ModelInfo]) -> Ending | None:
        if not starting.done():
            self._say(f"start-up failed: {self._engine.cause}")
            return Ending.START_FAILED
        try:
            model = starting.result()
        except (StartupError, NotAllReady) as error:
            self._say(f"start-up failed: {error}")
            return Ending.START_FAILED
        except Exception:  # noqa: BLE001  (whatever it is, the ranks must be stopped)
            self._say(f"start-up failed\n{traceback.format_exc()}")
            return Ending.START_FAILED
        self._engine.ready(model)
        self._was_ready = True
        self._ctx.ready({"url": self._url})
        self._say(f"ready {self._url}")
        return None

    async def _end(self, http: asyncio.Task[None]) -> set[Ending]:
        """Answer everybody, close the port, stop the ranks, account for it; all bounded."""
        by = self._by()
        self._fleet.cease()
        first = Action.SIGTERM
        written_by = Deadline.after(_FLUSH_S)
        if self._stops.stage is Action.DRAIN and self._was_ready:
            drained_by = Deadline.after(min(self._config.drain_s, by.left_s() - self._graces_s))
            await _first(self._engine.drain(drained_by), self._stops.now())
            if self._stops.stage is Action.DRAIN and not drained_by.passed:
                first, written_by = Action.DRAIN, drained_by
        self._engine.stop("the server is stopping")
        self._http.stop(written_by)
        reports, endings = await self._stop_ranks(first, by.sooner(self._by()))
        await self._stop_http(http, written_by)
        self._account(reports)
        if not http.done() or http.exception() is not None:
            self._say(f"the HTTP server did not end well: {http!r}")
            endings.add(Ending.ERROR)
        if any(report.survivors for report in reports):
            endings.add(Ending.SURVIVORS)
        if self._was_ready and any(report.cause for report in reports):
            endings.add(Ending.ENGINE_DEAD)  # dead before the stop, and heard of only in it
        return endings

    async def _stop_http(self, http: asyncio.Task[None], written_by: Deadline) -> None:
        """Let clients read what was made for them, but no longer than until "stop now"."""
        ending = asyncio.wait({http}, timeout=written_by.left_s() + _FLUSH_S)
        await _first(ending, self._stops.now())
        if not http.done():
            self._http.stop(Deadline.after(_FLUSH_S))
            await asyncio.wait({http}, timeout=2 * _FLUSH_S)

    def _by(self) -> Deadline:
        """Say when the ranks must be gone, as far as is known now."""
        whole = self._config.drain_s + self._graces_s
        return Deadline.after(min(whole, self._stops.by.left_s() - MARGIN_S))

    async def _stop_ranks(
        self, first: Action, by: Deadline
    ) -> tuple[list[ShutdownReport], set[Ending]]:
        """Stop them, harder as soon as that is asked; what does not come back is an error."""
        stopping = self._fleet.shut_down(by, first=first)
        if not stopping:
            return [], set()
        await _first(asyncio.wait(stopping, timeout=by.left_s() + MARGIN_S / 2), self._stops.now())
        if not all(each.done() for each in stopping):
            now_by = by.sooner(self._by())
            # A second caller joins the stop in progress, and shortens it.
            self._fleet.shut_down(now_by, first=Action.SIGTERM)
            await asyncio.wait(stopping, timeout=now_by.left_s() + MARGIN_S / 2)
        reports: list[ShutdownReport] = []
        endings: set[Ending] = set()
        for each in stopping:
            try:
                reports.append(each.result())
            except asyncio.InvalidStateError:
                self._say("the ranks' executor did not come back from its stop")
                endings.add(Ending.ERROR)
            except Exception:  # noqa: BLE001  (the account is still owed)
                self._say(f"stopping the ranks failed\n{traceback.format_exc()}")
                endings.add(Ending.ERROR)
        return reports, endings

    def _account(self, reports: list[ShutdownReport]) -> None:
        self._ctx.send_report(
            {
                "groups": [report.to_dict() for report in reports],
                "retired": [_shortened(report) for report in self._fleet.retired],
                "cause": self._engine.cause,
                "unfinished_requests": self._engine.unfinished,
            }
        )


def _shortened(report: ShutdownReport) -> dict[str, Any]:
    """Give a replaced group's account with few last words: many of them must fit one frame."""
    told = report.to_dict()
    for worker in told["workers"]:
        worker["last_stderr"] = worker["last_stderr"][-_KEPT_LINES:]
    return told


async def _first(*works: Awaitable[Any]) -> None:
    """Wait until one is over, and give up the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
