"""The server's life: start, serve, drain, stop. Every way through it ends in `_end`."""

from __future__ import annotations

import asyncio
import threading
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from stopbath.engine.engine import Engine
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
    from stopbath.executor.base import Executor
    from stopbath.lifecycle import ShutdownReport
    from stopbath.messages import ModelInfo
    from stopbath.server.context import ServerContext
    from stopbath.server.stops import Stops

__all__ = ["MARGIN_S", "Life"]

MARGIN_S = 1.0
"""What the server keeps of a stop's budget for the last answers and the report."""

_FLUSH_S = 0.3  # for answers that are made to reach clients, when there is no drain to finish in
_LAST_WORDS_S = 5.0  # for a failed start to say why, once a rank is known to be lost

T = TypeVar("T")


class Life:
    """One server over one replica, from the first connection to the account of its stop."""

    def __init__(
        self,
        ctx: ServerContext,
        config: ServeConfig,
        *,
        listener: socket.socket,
        executor: Executor,
        stops: Stops,
        say: Callable[[str], None],
    ) -> None:
        self._ctx, self._config, self._executor = ctx, config, executor
        self._stops, self._say = stops, say
        self._url = url_of(listener)
        self._engine = Engine([executor], queue_limit=config.queue_limit, capacity=config.capacity)
        processes = Processes(ctx.guardian_pid, ctx.keeper_pid)
        self._http = HttpServer(create_app(self._engine, config, processes), listener)
        self._graces_s = config.terminate_s + config.kill_s
        self._was_started = False  # there are ranks to stop
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
        starting = self._start()
        ends: list[asyncio.Future[Any]] = [http, asked]
        try:
            await asyncio.wait([*ends, starting, dead], return_when=asyncio.FIRST_COMPLETED)
            if not (http.done() or asked.done()):
                if not starting.done():  # dead: the start should be telling why any moment now
                    await asyncio.wait([*ends, starting], timeout=_LAST_WORDS_S)
                problem = self._started(starting)
                if problem is not None:
                    return {problem}
                if self._config.on_engine_death == "exit":
                    ends.append(dead)
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return {Ending.ERROR} if http.done() else ({Ending.ASKED} if asked.done() else set())
        finally:
            asked.cancel()
            dead.cancel()

    def _start(self) -> asyncio.Future[ModelInfo]:
        try:
            # On this thread, though it is quick: so no stop can come before it, and miss it.
            self._executor.start()
        except Exception as error:  # noqa: BLE001  (told by whoever reads the future)
            failed: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            return failed
        self._was_started = True
        # The group bounds it: a budget for each phase, extended by progress, under a hard cap.
        return _in_thread(lambda: self._executor.wait_ready(Deadline.never()), "start")

    def _started(self, starting: asyncio.Future[ModelInfo]) -> Ending | None:
        if not starting.done():
            self._say(f"start-up failed: {self._engine.cause}")
            return Ending.START_FAILED
        try:
            model = starting.result()
        except StartupError as error:
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
        first = Action.SIGTERM
        written_by = Deadline.after(_FLUSH_S)
        if self._stops.stage is Action.DRAIN and self._was_ready:
            drained_by = Deadline.after(min(self._config.drain_s, by.left_s() - self._graces_s))
            await _first(self._engine.drain(drained_by), self._stops.now())
            if self._stops.stage is Action.DRAIN and not drained_by.passed:
                first, written_by = Action.DRAIN, drained_by
        self._engine.stop("the server is stopping")
        self._http.stop(written_by)
        report = None
        if self._was_started:
            report = await self._stop_ranks(first, by.sooner(self._by()))
        await self._stop_http(http, written_by)
        self._account(report)
        endings: set[Ending] = set()
        if not http.done() or http.exception() is not None:
            self._say(f"the HTTP server did not end well: {http!r}")
            endings.add(Ending.ERROR)
        if report is None and self._was_started:
            endings.add(Ending.ERROR)
        elif report is not None and report.survivors:
            endings.add(Ending.SURVIVORS)
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

    async def _stop_ranks(self, first: Action, by: Deadline) -> ShutdownReport | None:
        """Stop them, harder as soon as that is asked; None when the executor does not return."""
        stopping = _in_thread(lambda: self._executor.shutdown(by, first=first), "stop")
        await _first(
            asyncio.wait({stopping}, timeout=by.left_s() + MARGIN_S / 2), self._stops.now()
        )
        if not stopping.done():
            now_by = by.sooner(self._by())
            # A second caller joins the stop in progress, and shortens it.
            _in_thread(lambda: self._executor.shutdown(now_by, first=Action.SIGTERM), "stop now")
            await asyncio.wait({stopping}, timeout=now_by.left_s() + MARGIN_S / 2)
        if not stopping.done():
            self._say("the ranks' executor did not come back from its stop")
            return None
        try:
            return stopping.result()
        except Exception:  # noqa: BLE001  (the account is still owed)
            self._say(f"stopping the ranks failed\n{traceback.format_exc()}")
            return None

    def _account(self, report: ShutdownReport | None) -> None:
        self._ctx.send_report(
            {
                "groups": [] if report is None else [report.to_dict()],
                "cause": self._engine.cause,
                "unfinished_requests": self._engine.unfinished,
            }
        )


async def _first(*works: Awaitable[Any]) -> None:
    """Wait until one is over, and give up the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _in_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run what blocks on a daemon thread: unlike a pool's, it cannot keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)  # type: ignore[arg-type]
        else:
            future.set_exception(error)
            future.exception()  # counts as read: nobody may be waiting for it any more

    def run() -> None:
        value: T | None = None
        failure: BaseException | None = None
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001  (handed on, whatever it is)
            failure = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=run, name=f"stopbath-{name}", daemon=True).start()
    return future
