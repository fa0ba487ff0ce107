"""What the engine asks of an executor: one replica, K ranks that live and die together."""

from __future__ import annotations

from concurrent.futures import Future  # noqa: TC003  (msgspec reads the annotations)
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from stopbath.lifecycle import Action

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopbath.errors import WorkerLost
    from stopbath.lifecycle import Cause, Deadline, GroupState, ShutdownReport, WorkerState
    from stopbath.messages import ModelInfo

__all__ = ["CallHandle", "Executor", "RankOutcome", "RankStatus", "ReplicaStatus"]


class RankOutcome(msgspec.Struct, frozen=True):
    """What one rank made of a call: a value, or an error with its type and traceback."""

    rank: int
    value: Any = None
    error_kind: str | None = None
    error_message: str = ""
    traceback: str = ""

    @property
    def ok(self) -> bool:
        """Whether the rank returned a value."""
        return self.error_kind is None


class CallHandle(msgspec.Struct, frozen=True):
    """A call under way.

    `future` ends in every case: with one `RankOutcome` per addressed rank, with `WorkerLost`
    (the replica's first cause), with `DeadlinePassed` at the call's deadline, or with `Draining`
    when the executor is being shut down. A call that was cancelled ends with outcomes whose
    `error_kind` is `messages.CANCELLED`. The caller cannot cancel the future itself: `cancel(id)`
    of the executor reaches the ranks. Done callbacks run on whichever thread ended the call and
    must be quick; what they raise is logged and swallowed.
    """

    id: int
    future: Future[list[RankOutcome]]


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank, as `/v1/status` shows it."""

    name: str
    rank: int
    pid: int | None
    state: WorkerState
    last_progress_s: float | None  # seconds since the rank last said something


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica, as `/v1/status` shows it."""

    name: str
    state: GroupState
    cause: Cause | None
    ranks: tuple[RankStatus, ...]


class Executor(Protocol):
    """One replica. Methods are safe from any thread; none blocks on a dead or stuck rank."""

    def start(self) -> None:
        """Start the ranks; returns at once."""
        ...

    def wait_ready(self, by: Deadline) -> ModelInfo:
        """Wait until every rank is ready; `StartupError` names the one that failed."""
        ...

    def call(
        self,
        method: str,
        params: Any,
        *,
        ranks: Literal["all", "first"] = "all",
        deadline: Deadline | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> CallHandle:
        """Run `method` in the ranks; `on_progress(step, steps)` runs on the thread that reads.

        "first": every rank runs it (they may sit in collectives together) and the outcome is
        rank 0's alone; "all": one outcome per rank, in rank order. Calls run one after another
        in the order of these calls. Progress is throttled to about 20 a second, the last step
        always comes through. A call that cannot be sent (dead, draining, channel full, EMFILE)
        ends its future with the reason at once; TypeError or ValueError are raised only for
        params that no frame can hold.
        """
        ...

    def ask(
        self,
        method: str,
        params: Any,
        *,
        ranks: Literal["all", "first"] = "all",
        deadline: Deadline | None = None,
    ) -> list[RankOutcome]:
        """Call and wait for the outcomes; raises what the call's future ends with.

        Off the main thread the caller reads the answers itself, which makes a short call several
        times as fast: no other thread has to be woken.
        """
        ...

    def cancel(self, call_id: int) -> None:
        """Give up a call at its next step, on all ranks together; the future still ends.

        Unknown and finished ids are ignored: ids are never used twice, so a late cancel cannot
        reach another call.
        """
        ...

    def hold(self, call_id: int) -> None:
        """Have a call make no step until `resume`; it keeps what it has. Step mode only.

        Unknown and finished ids are ignored; a call that ends nevertheless, ends as usual.
        """
        ...

    def resume(self, call_id: int) -> bool:
        """Go on with a call on hold; False when the rank cannot be told, so that it never will."""
        ...

    def on_failure(self, callback: Callable[[Cause], None]) -> None:
        """Have `callback` called once, at once, with the first cause; a late one is replayed."""
        ...

    def lost(self) -> WorkerLost | None:
        """Give what requests end with since the replica has a cause; None before."""
        ...

    def status(self) -> ReplicaStatus:
        """Say how the replica is; reads state, asks nobody."""
        ...

    def shutdown(
        self, by: Deadline | None = None, *, first: Action = Action.DRAIN
    ) -> ShutdownReport:
        """Stop the ranks; idempotent, joins a stop in progress. Pending calls end first."""
        ...

    def kill(self) -> None:
        """Shorten a stop to SIGKILL now."""
        ...
