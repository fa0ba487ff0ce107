"""From an accepted request to its one final answer, over any number of replicas."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from stopbath.engine.alarm import Alarm
from stopbath.engine.condition import Condition
from stopbath.engine.dispatch import begin
from stopbath.engine.events import Events
from stopbath.engine.job import Job
from stopbath.engine.replicas import Replicas
from stopbath.engine.request import Request, RequestEvent, RequestState
from stopbath.engine.results import read_outcome
from stopbath.engine.scheduler import Scheduler
from stopbath.engine.state import EngineEvent, EngineState, EngineStatus
from stopbath.errors import DeadlinePassed, Draining, EngineError, RequestAborted, WorkerLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from stopbath.engine.replica import Replica
    from stopbath.engine.results import Answer
    from stopbath.executor.base import Executor, RankOutcome
    from stopbath.lifecycle import Deadline
    from stopbath.messages import GenerationRequest, GenerationResult, ModelInfo

__all__ = ["Engine"]


class Engine:
    """Queue, dispatch and answers. Lives on one event loop; only that loop's thread calls it.

    Args:
        executors: One per replica.
        queue_limit: How many requests may wait.
        capacity: How many requests a replica takes at a time.
        preempts: Whether a request of a higher priority may put one of a lower on hold.
        retry_on_death: Whether a request whose replica died goes to another one, once, unless
            its client has heard of a step.
    """

    def __init__(
        self,
        executors: Sequence[Executor],
        *,
        queue_limit: int = 64,
        capacity: int = 1,
        preempts: bool = False,
        retry_on_death: bool = False,
    ) -> None:
        self.events = Events()
        self.replicas = Replicas(executors, self.events)
        self._condition = Condition(self.events)
        self._capacity = capacity
        self._retry = retry_on_death
        self._scheduler = Scheduler(queue_limit, preempts=preempts)
        for name in self.replicas.names:
            self._scheduler.add_replica(name, capacity)
        self._jobs: dict[Request, Job] = {}
        self._alarm = Alarm(self._expire)
        self.unfinished = 0  # accepted, then ended by a fault or a stop

    # Life -------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """Where it is; READY and nothing else means that requests are accepted."""
        return self._condition.state

    @property
    def cause(self) -> str | None:
        """The first fault that is not mended."""
        return self.replicas.cause

    def watch(self) -> None:
        """Hear of failures from now on. Called once, on the loop, before the ranks start."""
        self.replicas.watch(self._failed)

    def ready(self, model: ModelInfo) -> None:
        """Accept requests: the ranks have loaded `model`."""
        self._condition.model = model
        if self.state is EngineState.STARTING:  # else a stop or a fault came first
            self._move(EngineEvent.READY)

    async def dead(self) -> None:
        """Wait until no replica is left, and none is to come."""
        await self._condition.dead()

    async def drain(self, by: Deadline) -> None:
        """Accept nothing new, finish what is accepted; what is left at `by` gets an error.

        No replica is restarted any more, so without a living one there is nothing to wait for.
        """
        self.replicas.cease()
        self._move(EngineEvent.DRAIN)
        answers = [job.answer for job in self._jobs.values()]
        if answers and self._scheduler.replicas:
            await asyncio.wait(answers, timeout=by.left_s())
        self.stop("the server is stopping and its drain deadline came first", DeadlinePassed)

    def stop(self, why: str, for_running: type[EngineError] = Draining) -> None:
        """Answer everything now: what runs with `for_running`, what waits with `Draining`."""
        self.replicas.cease()
        self._move(EngineEvent.STOP)
        for job in list(self._jobs.values()):
            begun = job.request.state is RequestState.RUNNING or job.call is not None
            error = for_running(why) if begun else Draining(f"{why}; the request had not begun")
            self.unfinished += 1
            self._scheduler.end(job.request, RequestEvent.FAIL)
            self._answer(job, error)
        self._alarm.set(self._scheduler.next_deadline())
        self.events.close()

    def _move(self, event: EngineEvent) -> None:
        self._condition.move(event, self.cause)

    def status(self) -> EngineStatus:
        """Say how it is; reads state, asks nobody."""
        return EngineStatus(
            state=self.state,
            cause=self.cause,
            waiting=self._scheduler.waiting,
            running=self._scheduler.running,
            replicas=self.replicas.views(),
        )

    # Replicas ---------------------------------------------------------------------------------

    def restore(self, name: str) -> None:
        """Use a replica again, whose new ranks are ready."""
        if not self._condition.mending:
            return  # a stop came first
        replica = self.replicas.restore(name)
        self._scheduler.add_replica(name, self._capacity)
        self._move(EngineEvent.RESTORED)
        self.replicas.watch_one(replica, self._failed)
        self._pump()

    def give_up(self, name: str, cause: str) -> None:
        """Expect a lost replica no longer."""
        if self.replicas.give_up(name, cause) and not self.replicas.hopeful:
            self._move(EngineEvent.DIED)
            self._fail(self._scheduler.give_up(), WorkerLost(cause))

    # Requests ---------------------------------------------------------------------------------

    def check_accepting(self) -> ModelInfo:
        """Give the model, or raise what a request would be refused with now."""
        return self._condition.check_accepting(self.cause)

    def submit(
        self,
        generation: GenerationRequest,
        *,
        client: str,
        deadline: Deadline,
        priority: int = 0,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Job:
        """Accept a request, or raise why not; whoever has submitted it awaits its `result`.

        `on_progress(step, steps)` runs on the loop; the higher `priority` goes first.
        """
        self.check_accepting()
        request = self._scheduler.submit(generation.id, client, deadline.at_s, priority)
        answer = asyncio.get_running_loop().create_future()
        job = Job(request, generation, deadline, answer, on_progress)
        self._jobs[request] = job
        self._pump()
        return job

    async def result(self, job: Job) -> GenerationResult:
        """Give the one answer of a request.

        Cancelling the caller gives up this request and no other. Raises `EngineError`,
        `RequestInvalid` or `RequestAborted`, by the request's deadline at the latest.
        """
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

    def _abort(self, job: Job) -> None:
        if not job.request.ended:
            self._scheduler.end(job.request, RequestEvent.ABORT)
            self._answer(job, RequestAborted(f"request {job.request.id} was aborted"))
            self._pump()

    # Work -------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Start whatever can be started, until nothing can."""
        while True:
            preempted = self._scheduler.make_room()
            if preempted is not None:
                self._jobs[preempted].hold()
            started = self._scheduler.dispatch()
            if not started:
                break
            for request in started:
                if request.state is RequestState.RUNNING:  # its replica may have been lost since
                    self._start(self._jobs[request])
        self._alarm.set(self._scheduler.next_deadline())

    def _start(self, job: Job) -> None:
        if job.call is not None:
            if not job.resume():
                self._scheduler.end(job.request, RequestEvent.FAIL)
                self._answer(job, EngineError("the replica does not read what it is told"))
            return
        replica = self.replicas[job.request.replica or ""]
        try:
            begin(job, replica, self._call_ended)
        except WorkerLost as lost:
            # It never began there, so it is free to go to another replica.
            self._scheduler.preempt(job.request)
            self._lose(replica, lost)
        except Exception as error:  # noqa: BLE001  (one request's bad luck must not end the loop)
            self._scheduler.end(job.request, RequestEvent.FAIL)
            self._scheduler.release(job.request)
            failure = EngineError(f"{type(error).__name__}: {error}")
            self._answer(job, error if isinstance(error, EngineError) else failure)

    def _call_ended(
        self,
        job: Job,
        replica: Replica,
        executor: Executor,
        call_id: int,
        future: Future[list[RankOutcome]],
    ) -> None:
        answer = read_outcome(future)
        if isinstance(answer, WorkerLost) and replica.executor is executor:
            self._lose(replica, executor.lost() or answer)
        if job.call == (executor, call_id):  # else it has been sent elsewhere since
            job.call = None
            if not job.request.ended:
                event = RequestEvent.FAIL if isinstance(answer, Exception) else RequestEvent.FINISH
                self._scheduler.end(job.request, event)
                self._answer(job, answer)
            self._scheduler.release(job.request)
        self._pump()

    def _failed(self, replica: Replica, executor: Executor, error: WorkerLost) -> None:
        if replica.executor is executor:  # else it has been replaced since
            self._lose(replica, error)
            self._pump()

    def _lose(self, replica: Replica, lost: WorkerLost) -> None:
        """Take a replica out: readiness first, then the answers, all in one turn of the loop."""
        if replica.name not in self._scheduler.replicas or self.state is EngineState.STOPPED:
            return  # heard of it already, or it was asked to end
        error = self.replicas.lose(replica, lost, may_restart=self._condition.mending)
        hopeful = self.replicas.hopeful
        retry = self._to_retry(replica.name) if self._retry else set()
        ended = self._scheduler.lose_replica(replica.name, retry=retry, keep_queue=hopeful)
        for request in retry.difference(ended):
            job = self._jobs[request]
            job.call, job.retried = None, True
        if not hopeful:
            self._move(EngineEvent.DIED)
        elif not self._scheduler.replicas:
            self._move(EngineEvent.LOST)
        self._fail(ended, error)

    def _to_retry(self, name: str) -> set[Request]:
        """Find who runs on a replica and may be begun anew elsewhere."""
        return {
            request
            for request, job in self._jobs.items()
            if request.replica == name
            and job.fresh
            and (request.state is RequestState.RUNNING or job.call is not None)
        }

    def _fail(self, ended: list[Request], error: EngineError) -> None:
        for request in ended:
            self.unfinished += 1
            self._answer(self._jobs[request], error)

    def _expire(self) -> None:
        for request, state in self._scheduler.expire(time.monotonic()):
            where = "in the queue" if state is RequestState.WAITING else "unfinished"
            self._answer(
                self._jobs[request],
                DeadlinePassed(f"the request's deadline came while it was {where}"),
            )
        self._pump()

    def _answer(self, job: Job, answer: Answer) -> None:
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
