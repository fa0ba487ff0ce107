"""Whether requests are accepted, and with what they are refused otherwise."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from stopbath.engine.state import EngineEvent, EngineState, after
from stopbath.errors import Draining, Restarting, Starting, WorkerLost

if TYPE_CHECKING:
    from stopbath.engine.events import Events
    from stopbath.messages import ModelInfo

__all__ = ["Condition"]


class Condition:
    """The state of the engine; lives on its loop."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._dead = asyncio.Event()
        self.state = EngineState.STARTING
        self.model: ModelInfo | None = None

    def move(self, event: EngineEvent, cause: str | None) -> None:
        """Move along the table, and tell whoever listens."""
        before, self.state = self.state, after(self.state, event)
        if event is EngineEvent.DIED:
            self._dead.set()
        if self.state is not before:
            self._events.publish("engine", state=self.state.value, cause=cause)

    @property
    def mending(self) -> bool:
        """Whether a lost replica may come back; else the server stops, or has not begun."""
        return self.state in {EngineState.READY, EngineState.RECOVERING}

    async def dead(self) -> None:
        """Wait until no replica is left, and none is to come."""
        await self._dead.wait()

    def check_accepting(self, cause: str | None) -> ModelInfo:
        """Give the model, or raise what a request would be refused with now."""
        if self.state is EngineState.STARTING:
            raise Starting("the model is being loaded; try again later")
        if self.state is EngineState.DEAD:
            raise WorkerLost(f"the engine is dead: {cause}")
        if self.state is EngineState.RECOVERING:
            raise Restarting(f"the model is being restarted: {cause}")
        if self.state is not EngineState.READY or self.model is None:
            raise Draining("the server is stopping and accepts no new requests")
        return self.model
