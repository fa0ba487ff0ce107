"""The replicas' processes: started together, restarted one by one, stopped together."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from stopbath.engine.restarts import RestartPolicy
from stopbath.engine.threads import in_thread
from stopbath.lifecycle import Action, Deadline, StartupError

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopbath.config import ServeConfig
    from stopbath.engine.engine import Engine
    from stopbath.executor.base import Executor
    from stopbath.lifecycle import ShutdownReport
    from stopbath.messages import ModelInfo

__all__ = ["Fleet", "NotAllReady"]

_KEPT: Final = 8  # accounts of incarnations that were replaced


class NotAllReady(Exception):
    """A replica was ready and then lost while another one still started."""


@dataclass(slots=True, eq=False)
class _Slot:
    """One replica: the executor it has now, and its restarts."""

    index: int
    name: str
    executor: Executor
    policy: RestartPolicy
    started: bool = False
    task: asyncio.Task[None] | None = None


class Fleet:
    """Owns the executors of all incarnations. Lives on the engine's loop, `kill` excepted.

    Isolation: what happens in one replica is nobody else's affair, the end of a start excepted,
    for which all must be ready. A restart begins when the old ranks are gone and its pause is
    over, and not at all over survivors, which may hold the device.

    Args:
        build: Makes the executor of the replica that its config names; again for every restart.
        config: What `serve` was told.
        say: Takes a line for the operator.
    """

    def __init__(
        self,
        build: Callable[[ServeConfig], Executor],
        config: ServeConfig,
        say: Callable[[str], None],
    ) -> None:
        self._build, self._config, self._say = build, config, say
        self._slots: dict[str, _Slot] = {}
        for index in range(config.replicas):
            executor = build(msgspec.structs.replace(config, replica=index))
            name = executor.status().name
            policy = RestartPolicy(config.max_restarts, config.restart_window_s)
            self._slots[name] = _Slot(index, name, executor, policy)
        self._engine: Engine | None = None
        self._ceased = False
        self.retired: deque[ShutdownReport] = deque(maxlen=_KEPT)
        """The accounts of incarnations that were replaced, the last ones."""

    @property
    def executors(self) -> list[Executor]:
        """The executor of every replica, in order."""
        return [slot.executor for slot in self._slots.values()]

    def serve(self, engine: Engine) -> None:
        """Restart what this engine loses, as the policy allows."""
        self._engine = engine
        engine.replicas.restarts_with(self._begin_restart)

    # Start ------------------------------------------------------------------------------------

    def start(self) -> asyncio.Future[ModelInfo]:
        """Start every replica; the future ends when all are ready, or when the first fails.

        They are begun on this thread, though it is quick: so no stop can come before it, and
        miss one. Their groups bound it: a budget for each phase, extended by progress.
        """
        try:
            for slot in self._slots.values():
                slot.executor.start()
                slot.started = True
        except Exception as error:  # noqa: BLE001  (told by whoever reads the future)
            failed: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            return failed
        return asyncio.ensure_future(self._all_ready())

    async def _all_ready(self) -> ModelInfo:
        models = await asyncio.gather(*(self._ready(slot) for slot in self._slots.values()))
        if self._engine is not None and self._engine.cause is not None:
            raise NotAllReady(self._engine.cause)
        for slot in self._slots.values():
            slot.policy.ready(time.monotonic())
        return models[0]

    @staticmethod
    def _ready(slot: _Slot) -> asyncio.Future[ModelInfo]:
        executor = slot.executor
        return in_thread(lambda: executor.wait_ready(Deadline.never()), f"start-{slot.name}")

    # Restart ----------------------------------------------------------------------------------

    def _begin_restart(self, name: str) -> bool:
        slot = self._slots[name]
        if self._ceased or self._config.on_engine_death != "restart":
            return False
        delay_s = slot.policy.died(time.monotonic())
        if delay_s is None:
            self._say(f"{name} is not restarted again, after {slot.policy.in_a_row} times in a row")
            return False
        slot.task = asyncio.create_task(self._restart(slot, delay_s), name=f"restart {name}")
        return True

    async def _restart(self, slot: _Slot, delay_s: float) -> None:
        """Try until the replica serves or the policy gives up; told to the engine either way."""
        assert self._engine is not None  # noqa: S101  (it is who asks for restarts)
        try:
            failure = await self._try_again(slot, delay_s)
        except Exception:  # noqa: BLE001  (a bug of ours must not leave requests waiting)
            failure = f"{slot.name} could not be restarted\n{traceback.format_exc()}"
        slot.task = None
        if failure is None:
            self._say(f"{slot.name} is ready again")
            self._engine.restore(slot.name)
        else:
            self._say(failure)
            self._engine.give_up(slot.name, failure)

    async def _try_again(self, slot: _Slot, delay_s: float | None) -> str | None:
        """Give None once the replica is ready, else why it never will be."""
        failure = ""
        while delay_s is not None:
            held = await self._take_down(slot)
            if held:
                return held
            self._say(f"{slot.name} is restarted in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            try:
                await self._start_anew(slot)
            except StartupError as error:
                failure = f"{slot.name} could not be restarted: {error}"
                self._say(failure)
                delay_s = slot.policy.died(time.monotonic())
            else:
                slot.policy.ready(time.monotonic())
                return None
        return f"{failure}\n{slot.name} is not restarted again, after {slot.policy.in_a_row} times"

    async def _take_down(self, slot: _Slot) -> str:
        """End what is left of an incarnation; gives why its place cannot be used again, or ""."""
        if not slot.started:
            return ""
        config, executor = self._config, slot.executor
        by = Deadline.after(config.terminate_s + config.kill_s)
        report = await in_thread(
            lambda: executor.shutdown(by, first=Action.SIGTERM), f"end-{slot.name}"
        )
        if report.survivors:
            return f"{slot.name} is not restarted: {report.survivors} of it is still alive"
        self.retired.append(report)
        return ""

    async def _start_anew(self, slot: _Slot) -> None:
        assert self._engine is not None  # noqa: S101
        executor = self._build(msgspec.structs.replace(self._config, replica=slot.index))
        slot.started, slot.executor = False, executor
        self._engine.replicas.replace(slot.name, executor)
        executor.start()
        slot.started = True
        await self._ready(slot)

    # Stop -------------------------------------------------------------------------------------

    def cease(self) -> None:
        """Restart nothing any more; what is being started is left to `shut_down`."""
        self._ceased = True
        for slot in self._slots.values():
            if slot.task is not None:
                slot.task.cancel()

    def shut_down(self, by: Deadline, *, first: Action) -> list[asyncio.Future[ShutdownReport]]:
        """Stop whatever was started, all at once; joins and shortens a stop in progress."""
        self.cease()

        def stopping(executor: Executor, name: str) -> asyncio.Future[ShutdownReport]:
            return in_thread(lambda: executor.shutdown(by, first=first), f"stop-{name}")

        return [stopping(s.executor, s.name) for s in self._slots.values() if s.started]

    def kill(self) -> None:
        """Kill every rank now; from any thread."""
        self._ceased = True
        for slot in self._slots.values():
            with suppress(Exception):  # not started, or ended: there is nothing to kill
                slot.executor.kill()
