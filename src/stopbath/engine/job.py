"""An accepted request with what it takes to run and to answer it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from stopbath.engine.request import Request
    from stopbath.executor.base import Executor
    from stopbath.lifecycle import Deadline
    from stopbath.messages import GenerationRequest, GenerationResult

__all__ = ["Job"]


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way; the engine's own, others only hold it."""

    request: Request
    generation: GenerationRequest
    deadline: Deadline
    answer: asyncio.Future[GenerationResult]
    on_progress: Callable[[int, int], None] | None
    call: tuple[Executor, int] | None = None  # while a replica works on it
    delivered: bool = False  # its client has heard of a step
    retried: bool = False

    @property
    def fresh(self) -> bool:
        """Whether it may be begun anew elsewhere: the first try, and nothing of it was seen."""
        return not (self.delivered or self.retried)

    def hold(self) -> None:
        """Have its steps stop; its call stays open."""
        if self.call is not None:
            executor, call_id = self.call
            executor.hold(call_id)

    def resume(self) -> bool:
        """Have its steps go on; False when they never will."""
        if self.call is None:
            return False
        executor, call_id = self.call
        return executor.resume(call_id)

    def hear(self, executor: Executor, step: int, steps: int) -> None:
        """Pass a step on, unless it comes from a replica that the request has left."""
        if self.on_progress is not None and self.call is not None and self.call[0] is executor:
            self.delivered = True
            self.on_progress(step, steps)
