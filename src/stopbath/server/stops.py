"""The stages of a stop, as they reach the server from the control thread or as a signal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from typing import TYPE_CHECKING

from stopbath.lifecycle import Action, Deadline

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from stopbath.lifecycle import StopNotice

__all__ = ["Stops"]


class Stops:
    """What was asked so far: the harshest stage counts, and the earliest deadline.

    `on_kill` runs at once on the thread that hears of the last stage: by then the loop may be
    the very thing that hangs.
    """

    def __init__(self, on_kill: Callable[[], None]) -> None:
        self._on_kill = on_kill
        self._lock = threading.RLock()  # a signal handler may come in the middle of `post`
        self._stage: Action | None = None
        self._by = Deadline.never()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked = asyncio.Event()
        self._now = asyncio.Event()

    def attach(self) -> None:
        """Wake the running loop from now on; what came before counts."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
            self._tell()

    def hear(self, notice: StopNotice) -> None:
        """Take a stage from the guardian; safe from any thread."""
        self.post(notice.action, notice.within_s)

    def post(self, action: Action, within_s: float) -> None:
        """Take a stage, and the seconds after which somebody harsher acts."""
        with self._lock:
            self._stage = action if self._stage is None else max(self._stage, action)
            self._by = self._by.sooner(Deadline.after(within_s))
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: it is over
                    self._loop.call_soon_threadsafe(self._tell)
        if action is Action.SIGKILL:
            self._on_kill()

    def take_signals(self, within_s: float) -> None:
        """Take SIGTERM and SIGINT as "stop now" instead of dying with the ranks unstopped.

        The guardian sends SIGTERM to a server that is still starting, beside its notice.
        """
        if threading.current_thread() is not threading.main_thread():
            return  # only there can Python install handlers

        def stop_now(number: int, frame: FrameType | None) -> None:
            del number, frame
            self.post(Action.SIGTERM, within_s)

        signal.signal(signal.SIGTERM, stop_now)
        signal.signal(signal.SIGINT, stop_now)

    async def asked(self) -> None:
        """Wait for the first stage."""
        await self._asked.wait()

    async def now(self) -> None:
        """Wait until it is "stop now" or harsher."""
        await self._now.wait()

    @property
    def stage(self) -> Action | None:
        """The harshest stage so far."""
        return self._stage

    @property
    def by(self) -> Deadline:
        """When somebody harsher acts."""
        return self._by

    def _tell(self) -> None:
        if self._stage is not None:
            self._asked.set()
        if self._stage is not None and self._stage >= Action.SIGTERM:
            self._now.set()
