"""The serve loop of a rank in step mode: one model call after another, each for many requests."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from stopbath.messages import GENERATE, GenerationRequest, Reply
from stopbath.pipelines.base import Cancelled
from stopbath.wire import ChannelClosed
from stopbath.worker.loop import RankLoop
from stopbath.worker.rank import result_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Collection, Iterable, Mapping

    from PIL.Image import Image

    from stopbath.messages import Call
    from stopbath.pipelines.base import Sample, StepPipeline
    from stopbath.worker.loop import CallWatch

__all__ = ["BatchLoop"]


@dataclass(slots=True, eq=False)
class _Waiting:
    """A call for pictures that is not in the batch yet."""

    watch: CallWatch
    request: GenerationRequest
    began_s: float


@dataclass(slots=True, eq=False)
class _Running:
    """A call for pictures that is in the batch."""

    watch: CallWatch
    request: GenerationRequest
    began_s: float
    sample: Sample


class BatchLoop(RankLoop):
    """Admits calls of `GENERATE` to a running batch; each leaves it when its own steps are done.

    A turn takes in what has come, drops what nobody wants any more, and makes one model call for
    the samples that can share one; those of another size have the next turn. Calls on hold have
    none, and keep their latents and their place in their schedule in the rank. Calls of other
    methods are answered between two turns. `capacity` is the number of pictures in the batch; a
    request for more than that runs when nothing else does.

    What goes wrong ends the calls it concerns, never the rank: a request that cannot be encoded
    or stepped ends alone, an error of the shared model call ends the requests in it.
    """

    def __init__(
        self,
        sock: socket.socket,
        methods: Mapping[str, Callable[[Any, CallWatch], Any]],
        pipeline: StepPipeline,
        capacity: int,
        **how: Any,
    ) -> None:
        super().__init__(sock, methods, **how)
        self._pipeline = pipeline
        self._capacity = capacity
        self._waiting: deque[_Waiting] = deque()
        self._running: deque[_Running] = deque()  # the next to get a step is the first

    def _work(self) -> None:
        while True:
            idle = not (self._waiting or self._active())
            if idle:
                self._line.wait(news=True)
            calls = self._inbox.take()
            if self._inbox.ended or (idle and not calls and self._inbox.leaving):
                return
            self._line.leave()
            for call in calls:
                self._accept(call)
            self._drop(self._unwanted())
            self._admit()
            if self._active():
                self._step()
                self._finish([run for run in self._running if run.sample.over])

    def _active(self) -> list[_Running]:
        """Give those in the batch that get steps: not those on hold, which keep what they have."""
        held = self._inbox.held
        return [run for run in self._running if run.watch.call_id not in held]

    def _accept(self, call: Call) -> None:
        if call.method != GENERATE or GENERATE in self._methods:
            self._answer(call)
            self._line.leave()  # for what comes after it in this turn
            return
        try:
            request = msgspec.convert(call.params, GenerationRequest)
        except msgspec.ValidationError as error:
            self._fail(call.id, error)
            return
        self._waiting.append(_Waiting(self._watch(call), request, time.monotonic()))

    def _unwanted(self) -> set[int]:
        """Give the calls that nobody wants any more."""
        known = [each.watch for each in self._waiting] + [each.watch for each in self._running]
        return {watch.call_id for watch in known if watch.cancelled}

    def _drop(self, unwanted: Collection[int]) -> None:
        for waiting in [each for each in self._waiting if each.watch.call_id in unwanted]:
            self._waiting.remove(waiting)
            self._fail(waiting.watch.call_id, Cancelled("given up before its first step"))
        for run in [each for each in self._running if each.watch.call_id in unwanted]:
            done, steps = run.sample.steps_done, run.sample.steps
            self._leave([run], Cancelled(f"given up after step {done} of {steps}"))

    def _admit(self) -> None:
        """Take in whoever has room, in the order they came."""
        active = self._active()
        room = self._capacity - sum(run.sample.pictures for run in active)
        admitted: list[_Waiting] = []
        while self._waiting:
            first = self._waiting[0]
            alone = not (active or admitted)
            if first.request.n > room and not alone:
                break
            room -= first.request.n
            admitted.append(self._waiting.popleft())
        if not admitted:
            return
        begun = self._pipeline.begin([waiting.request for waiting in admitted])
        for waiting, sample in zip(admitted, begun, strict=True):
            self._enter(waiting, sample)

    def _enter(self, waiting: _Waiting, sample: Sample | Exception) -> None:
        if isinstance(sample, Exception):
            self._fail(waiting.watch.call_id, sample)
        else:
            run = _Running(waiting.watch, waiting.request, waiting.began_s, sample)
            self._running.append(run)

    def _step(self) -> None:
        """Make one model call for the first in line and all who can share it."""
        active = self._active()
        if not active:
            return  # put on hold since the turn began
        shape = active[0].sample.shape
        together = [run for run in active if run.sample.shape == shape]
        for run in together:  # to the end of the line
            self._running.remove(run)
        self._running.extend(together)
        try:
            errors = self._pipeline.step([run.sample for run in together])
        except Exception as error:  # noqa: BLE001  (of the model: it ends whom it computed for)
            self._leave(together, error)
            return
        for run, problem in zip(together, errors, strict=True):
            if problem is not None:
                self._stumble(run, problem)
            else:
                run.watch.progress(run.sample.steps_done, run.sample.steps)

    def _stumble(self, run: _Running, problem: Exception) -> None:
        self._leave([run], problem)

    def _finish(self, over: list[_Running]) -> None:
        if not over:
            return
        try:
            pictures = self._pipeline.finish([run.sample for run in over])
        except Exception as error:  # noqa: BLE001  (as above)
            self._leave(over, error)
            return
        for run, images in zip(over, pictures, strict=True):
            self._running.remove(run)
            self._reply(run, images)

    def _reply(self, run: _Running, images: list[Image]) -> None:
        call_id = run.watch.call_id
        try:
            value = result_of(run.request, images, run.began_s)
            self._line.send(Reply(id=call_id, value=value))
        except ChannelClosed:
            self._inbox.done(call_id)  # the reader sees it too, and the loop ends at a next turn
        except Exception as error:  # noqa: BLE001  (a picture that cannot be encoded or sent)
            self._fail(call_id, error)
        else:
            self._inbox.done(call_id)

    def _leave(self, runs: Iterable[_Running], error: Exception) -> None:
        for run in runs:
            self._running.remove(run)
            self._fail(run.watch.call_id, error)

    def _fail(self, call_id: int, error: Exception) -> None:
        self._send_failure(call_id, error)
        self._inbox.done(call_id)
