"""A replica without processes: the test decides when calls progress, end, or fail."""

# ruff: noqa: D102  (the methods are those of the protocol)
from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from stopbath.errors import WorkerLost
from stopbath.executor.base import CallHandle, RankOutcome, RankStatus, ReplicaStatus
from stopbath.lifecycle import Action, Cause, Deadline, Exit, GroupState, WorkerState
from stopbath.messages import CANCELLED, ModelInfo

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = ModelInfo(
    pipeline="FakePipeline",
    family="fake",
    width=64,
    height=64,
    size_multiple=8,
    max_width=128,
    max_height=96,
    num_inference_steps=4,
    guidance_scale=3.0,
    max_prompt_tokens=77,
    device="cpu",
)

KILLED = Cause("rank1", 4321, "working", "killed by SIGKILL", Exit(signal=9), ("bye",))


@dataclass(eq=False)
class FakeCall:
    """A call as the executor got it."""

    id: int
    params: dict[str, Any]
    deadline: Deadline | None
    on_progress: Callable[[int, int], None] | None
    future: Future[list[RankOutcome]] = field(default_factory=Future)
    cancelled: threading.Event = field(default_factory=threading.Event)
    held: bool = False

    def finish(self, images: list[bytes] | None = None) -> None:
        """End with pictures, one for each that was asked for."""
        made = images or [b"aW1hZ2U="] * self.params["n"]
        value = {"id": self.params["id"], "images_b64": made, "seconds": 0.25}
        self.future.set_result([RankOutcome(0, value)])

    def fail(self, kind: str, message: str) -> None:
        """End as a rank that raised."""
        self.future.set_result([RankOutcome(0, None, kind, message, "Traceback …")])


@dataclass(frozen=True)
class FakeReport:
    """Just enough of a `ShutdownReport`."""

    survivors: tuple[str, ...] = ()
    cause: None = None

    def to_dict(self) -> dict[str, Any]:
        """Give JSON-able data."""
        return {"group": "replica0", "workers": [], "survivors": list(self.survivors)}


class FakeExecutor:
    """Implements `Executor`. `instant` answers every call at once.

    A cancelled call ends at once, unless `slow_cancel`: then the test ends it.
    """

    def __init__(
        self, name: str = "replica0", *, instant: bool = False, slow_cancel: bool = False
    ) -> None:
        self.name = name
        self.instant = instant
        self.slow_cancel = slow_cancel
        self.calls: list[FakeCall] = []
        self.called = threading.Semaphore(0)
        self.cause: Cause | None = None
        self.deaf = False  # cannot be told to resume
        self.shutdowns: list[Action] = []
        self.kills = 0
        self.starts = 0
        self.loaded = threading.Event()  # wait_ready returns
        self.start_error: Exception | None = None
        self.stop_blocked = threading.Event()
        self.stop_blocked.set()
        self.report = FakeReport()
        self._callbacks: list[Callable[[Cause], None]] = []
        self._ids = itertools.count(1)

    def start(self) -> None:
        self.starts += 1

    def wait_ready(self, by: Deadline) -> ModelInfo:
        self.loaded.wait(min(by.left_s(), 30))
        if self.start_error is not None:
            raise self.start_error
        return MODEL

    def call(
        self,
        method: str,
        params: Any,
        *,
        ranks: Literal["all", "first"] = "all",
        deadline: Deadline | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> CallHandle:
        assert (method, ranks) == ("generate", "first")
        call = FakeCall(next(self._ids), params, deadline, on_progress)
        self.calls.append(call)
        if self.cause is not None:
            call.future.set_exception(WorkerLost(str(self.cause)))
        elif self.instant:
            call.finish()
        self.called.release()
        return CallHandle(call.id, call.future)

    def cancel(self, call_id: int) -> None:
        call = self.calls[call_id - 1]
        call.cancelled.set()
        if not self.slow_cancel and not call.future.done():
            call.fail(CANCELLED, "given up")

    def hold(self, call_id: int) -> None:
        self.calls[call_id - 1].held = True

    def resume(self, call_id: int) -> bool:
        self.calls[call_id - 1].held = False
        return not self.deaf

    def on_failure(self, callback: Callable[[Cause], None]) -> None:
        self._callbacks.append(callback)
        if self.cause is not None:
            callback(self.cause)

    def die(self, cause: Cause = KILLED) -> None:
        """Lose a rank, as the supervisor's thread would tell it."""
        self.cause = cause
        for callback in self._callbacks:
            callback(cause)
        for call in self.calls:
            if not call.future.done():
                call.future.set_exception(WorkerLost(str(cause)))

    def lost(self) -> WorkerLost | None:
        return WorkerLost(str(self.cause)) if self.cause else None

    def status(self) -> ReplicaStatus:
        state = GroupState.STOPPED if self.cause or self.shutdowns else GroupState.READY
        rank = RankStatus("rank0", 0, 1234, WorkerState.READY, 0.5)
        return ReplicaStatus(self.name, state, self.cause, (rank,))

    def shutdown(self, by: Deadline | None = None, *, first: Action = Action.DRAIN) -> Any:
        del by
        self.shutdowns.append(first)
        if first >= Action.SIGTERM:
            self.stop_blocked.set()
        self.stop_blocked.wait(30)
        self.loaded.set()
        return self.report

    def kill(self) -> None:
        self.kills += 1
        self.stop_blocked.set()
