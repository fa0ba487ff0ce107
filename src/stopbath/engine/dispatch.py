"""A request's way into a replica, and the way back onto the loop."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec

from stopbath.errors import WorkerLost
from stopbath.messages import GENERATE

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from stopbath.engine.job import Job
    from stopbath.engine.replica import Replica
    from stopbath.executor.base import Executor, RankOutcome

    Ended = Callable[[Job, Replica, Executor, int, Future[list[RankOutcome]]], None]

__all__ = ["begin"]


def begin(job: Job, replica: Replica, ended: Ended) -> None:
    """Call the replica; `ended` comes on the loop. Raises what `Executor.call` raises."""
    executor, loop = replica.executor, asyncio.get_running_loop()

    def heard(step: int, steps: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(job.hear, executor, step, steps)

    handle = executor.call(
        GENERATE,
        msgspec.to_builtins(job.generation),
        ranks="first",
        deadline=job.deadline,
        # Without anybody to hear of them, no step wakes the loop.
        on_progress=None if job.on_progress is None else heard,
    )
    if handle.future.done() and isinstance(lost := handle.future.exception(), WorkerLost):
        raise lost  # it was dead before, and nothing has begun
    job.call = (executor, handle.id)

    def over(future: Future[list[RankOutcome]]) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(ended, job, replica, executor, handle.id, future)

    handle.future.add_done_callback(over)
