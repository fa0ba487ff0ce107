"""From an accepted request to its one final answer, over any number of replicas."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from stopbath.engine.request import Request, RequestEvent, RequestState
from stopbath.engine.results import read_outcome
from stopbath.engine.scheduler import Scheduler
from stopbath.engine.state import EngineEvent, EngineState, EngineStatus, after
from stopbath.errors import (
    DeadlinePassed,
    Draining,
    EngineError,
    RequestAborted,
    Starting,
    WorkerLost,
)
from stopbath.messages import GENERATE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from stopbath.engine.results import Answer
    from stopbath.executor.base import Executor, RankOutcome
    from stopbath.lifecycle import Cause, Deadline
    from stopbath.messages import GenerationRequest, GenerationResult, ModelInfo

__all__ = ["Engine"]


@dataclass(slots=True, eq=False)
class _Job:
    """A request with what it takes to run and to answer it."""

    request: Request
    generation: GenerationRequest
    deadline: Deadline
    answer: asyncio.Future[GenerationResult]
    on_progress: Callable[[int, int], None] | None
    call: tuple[Executor, int] | None = None  # while a replica works on it


class Engine:
    """Queue, dispatch and answers. Lives on one event loop; only that loop's thread calls it.

    `capacity` is how many requests a replica takes at a time.
    """

    def __init__(
        self, executors: Sequence[Executor], *, queue_limit: int = 64, capacity: int = 1
    ) -> None:
        self._executors = {executor.status().name: executor for executor in executors}
        self._scheduler = Scheduler(queue_limit)
        for name in self._executors:
            self._scheduler.add_replica(name, capacity)
        self._jobs: dict[Request, _Job] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._state = EngineState.STARTING
        self._dead = asyncio.Event()
        self.cause: str | None = None
        self.model: ModelInfo | None = None
        self.unfinished = 0  # accepted, then ended by a fault or a stop

    # Life -------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """Where it is; READY and nothing else means that requests are accepted."""
        return self._state

    def watch(self) -> None:
        """Hear of failures from now on. Called once, on the loop, before the ranks start."""
        loop = asyncio.get_running_loop()
        for name, executor in self._executors.items():

            def failed(cause: Cause, name: str = name) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                    loop.call_soon_threadsafe(self._failed, name, f"{name}: {cause}")

            executor.on_failure(failed)

    def ready(self, model: ModelInfo) -> None:
        """Accept requests: the ranks have loaded `model`."""
        self.model = model
        if self._state is EngineState.STARTING:  # else a stop or a fault came first
            self._state = after(self._state, EngineEvent.READY)

    async def dead(self) -> None:
        """Wait until no replica is left."""
        await self._dead.wait()

    async def drain(self, by: Deadline) -> None:
        """Accept nothing new, finish what is accepted; what is left at `by` gets an error."""
        self._state = after(self._state, EngineEvent.DRAIN)
        answers = [job.answer for job in self._jobs.values()]
        if answers:
            await asyncio.wait(answers, timeout=by.left_s())
        self.stop("the server is stopping and its drain deadline came first", DeadlinePassed)

    def stop(self, why: str, for_running: type[EngineError] = Draining) -> None:
        """Answer everything now: what runs with `for_running`, what waits with `Draining`."""
        self._state = after(self._state, EngineEvent.STOP)
        for job in list(self._jobs.values()):
            running = job.request.state is RequestState.RUNNING
            error = for_running(why) if running else Draining(f"{why}; the request had not begun")
            self.unfinished += 1
            self._scheduler.end(job.request, RequestEvent.FAIL)
            self._answer(job, error)
        self._arm()

    def status(self) -> EngineStatus:
        """Say how it is; reads state, asks nobody."""
        return EngineStatus(
            state=self._state,
            cause=self.cause,
            waiting=self._scheduler.waiting,
            running=self._scheduler.running,
            replicas=tuple(executor.status() for executor in self._executors.values()),
        )

    # Requests ---------------------------------------------------------------------------------

    def check_accepting(self) -> ModelInfo:
        """Give the model, or raise what a request would be refused with now."""
        if self._state is EngineState.STARTING:
            raise Starting("the model is being loaded; try again later")
        if self._state is EngineState.DEAD:
            raise WorkerLost(f"the engine is dead: {self.cause}")
        if self._state is not EngineState.READY or self.model is None:
            raise Draining("the server is stopping and accepts no new requests")
        return self.model

    async def generate(
        self,
        generation: GenerationRequest,
        *,
        client: str,
        deadline: Deadline,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> GenerationResult:
        """Make the pictures of one request.

        Cancelling the caller gives up this request and no other. `on_progress(step, steps)`
        runs on the loop. Raises `EngineError`, `RequestInvalid`, `RequestDuplicate` or
        `RequestAborted`, by `deadline` at the latest.
        """
        self.check_accepting()
        request = self._scheduler.submit(generation.id, client, deadline.at_s)
        answer = asyncio.get_running_loop().create_future()
        job = _Job(request, generation, deadline, answer, on_progress)
        self._jobs[request] = job
        self._pump()
        try:
            return await job.answer
        finally:
            self._abort(job)  # the caller was cancelled; otherwise there is nothing to give up
            if not job.answer.cancelled():
                job.answer.exception()  # cancelled in the turn of the answer: it counts as read

    def abort(self, request_id: str) -> bool:
        """Give up the living request with this id; False when there is none."""
        request = self._scheduler.find(request_id)
        if request is None:
            return False
        self._abort(self._jobs[request])
        return True

    def _abort(self, job: _Job) -> None:
        if not job.request.ended:
            self._scheduler.end(job.request, RequestEvent.ABORT)
            self._answer(job, RequestAborted(f"request {job.request.id} was aborted"))
            self._pump()

    # Work -------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Start whatever can be started, until nothing can."""
        while started := self._scheduler.dispatch():
            for request in started:
                if request.state is RequestState.RUNNING:  # its replica may have been lost since
                    self._start(self._jobs[request])
        self._arm()

    def _start(self, job: _Job) -> None:
        name = job.request.replica or ""
        executor = self._executors[name]
        loop = asyncio.get_running_loop()
        try:
            handle = executor.call(
                GENERATE,
                msgspec.to_builtins(job.generation),
                ranks="first",
                deadline=job.deadline,
                on_progress=self._relay(job, loop),
            )
        except WorkerLost as lost:
            # It never began there, so it is free to go to another replica.
            self._scheduler.preempt(job.request)
            self._lose(name, f"{name}: {lost}")
            return
        except Exception as error:  # noqa: BLE001  (one request's bad luck must not end the loop)
            self._scheduler.end(job.request, RequestEvent.FAIL)
            self._scheduler.release(job.request)
            failure = EngineError(f"{type(error).__name__}: {error}")
            self._answer(job, error if isinstance(error, EngineError) else failure)
            return
        job.call = (executor, handle.id)

        def ended(future: Future[list[RankOutcome]]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(self._call_ended, job, future)

        handle.future.add_done_callback(ended)

    @staticmethod
    def _relay(job: _Job, loop: asyncio.AbstractEventLoop) -> Callable[[int, int], None] | None:
        heard = job.on_progress
        if heard is None:  # then no step of it wakes the loop
            return None

        def relay(step: int, steps: int) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(heard, step, steps)

        return relay

    def _call_ended(self, job: _Job, future: Future[list[RankOutcome]]) -> None:
        job.call = None
        answer = read_outcome(future)
        if isinstance(answer, WorkerLost):
            name = job.request.replica or ""
            self._lose(name, f"{name}: {self._executors[name].status().cause or answer}")
        if not job.request.ended:
            failed = isinstance(answer, Exception)
            event = RequestEvent.FAIL if failed else RequestEvent.FINISH
            self._scheduler.end(job.request, event)
            self._answer(job, answer)
        self._scheduler.release(job.request)
        self._pump()

    def _failed(self, name: str, cause: str) -> None:
        self._lose(name, cause)
        self._pump()

    def _lose(self, name: str, cause: str) -> None:
        """Take a replica out: readiness first, then the answers, all in one turn of the loop."""
        if name not in self._scheduler.replicas or self._state is EngineState.STOPPED:
            return  # heard of it already, or it was asked to end
        self.cause = self.cause or cause
        lost = self._scheduler.lose_replica(name)
        if not self._scheduler.replicas:
            self._state = after(self._state, EngineEvent.DIED)
            self._dead.set()
        for request in lost:
            self.unfinished += 1
            self._answer(self._jobs[request], WorkerLost(cause))

    def _expire(self) -> None:
        for request, state in self._scheduler.expire(time.monotonic()):
            where = "in the queue" if state is not RequestState.RUNNING else "unfinished"
            self._answer(
                self._jobs[request],
                DeadlinePassed(f"the request's deadline came while it was {where}"),
            )
        self._pump()

    def _arm(self) -> None:
        """Set the one timer to the next deadline; without requests there is none."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._scheduler.next_deadline()
        if at is not None:
            left = max(0.0, at - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(left, self._expire)

    def _answer(self, job: _Job, answer: Answer) -> None:
        """Give a request that has ended its one answer; a call still under way is given up."""
        del self._jobs[job.request]
        if job.call is not None:
            executor, call_id = job.call
            executor.cancel(call_id)
        if job.answer.done():  # cancelled with its caller
            return
        if isinstance(answer, Exception):
            job.answer.set_exception(answer)
        else:
            job.answer.set_result(answer)
