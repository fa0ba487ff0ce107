"""The executor of one machine: K ranks in a worker group, one data channel to each."""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from stopbath.errors import Draining, EngineError, Overloaded, RequestStuck, WorkerLost
from stopbath.executor._calls import CallTable, outcome_of
from stopbath.executor._fault import FaultLatch
from stopbath.executor._pump import Pump
from stopbath.executor._ranks import TARGET, describe, status_of
from stopbath.executor._stuck import StuckWatch
from stopbath.lifecycle import Action, Deadline, Escalation, WorkerGroup
from stopbath.messages import (
    DUMP_SIGNAL,
    PEER_LOST,
    Call,
    Cancel,
    Dump,
    Dumped,
    Failure,
    FromRank,
    Hold,
    ModelInfo,
    Progress,
    Resume,
)
from stopbath.wire import Channel, ChannelClosed, WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stopbath.config import ServeConfig
    from stopbath.executor._threads import ThreadGroup
    from stopbath.executor.base import CallHandle, RankOutcome, ReplicaStatus
    from stopbath.lifecycle import Cause, ShutdownReport, Supervisor, WorkerSpec
    from stopbath.wire import Frame

    Ranks = WorkerGroup | ThreadGroup

__all__ = ["TARGET", "MultiprocExecutor"]

_log = logging.getLogger("stopbath.executor")

# A rank's channel ends some milliseconds before or after its death is seen. The death is the
# better cause, so the end of a channel alone counts only when no death follows.
_SUSPECT_S: Final = 5.0
_PUMP_END_S: Final = 2.0


class MultiprocExecutor:
    """One replica of K ranks on this machine; implements `Executor`.

    Every rank gets one end of a socketpair; with several ranks also a memfd at which
    torch.distributed meets (see `stopbath.worker.ranks.join`): neither has a name that could be
    left behind. One thread (the pump) reads all channels,
    except while a caller waits in `ask`.

    Args:
        config: What `serve` was told; all of it goes to the ranks.
        name: The replica's name, in reports and in `status()`.
        supervisor: Whose loop drives the group; by default the one this process shares.
        target: What a rank runs, "module:function"; for tests.
    """

    def __init__(
        self,
        config: ServeConfig,
        name: str = "replica0",
        *,
        supervisor: Supervisor | None = None,
        target: str = TARGET,
    ) -> None:
        self._config = config
        self._name = name
        self._supervisor = supervisor
        self._target = target
        self._calls = CallTable(config.ranks)
        self._send_lock = threading.Lock()  # calls reach every rank in the same order
        self._group: Ranks | None = None
        self._pump: Pump | None = None
        self._channels: list[Channel[FromRank]] = []
        self._heard_s: list[float | None] = [None] * config.ranks
        self._suspect: tuple[float, int, str] | None = None  # due, rank, what
        self._fault = FaultLatch()
        self._stuck = ""  # what was said of a stuck rank
        self._watch = StuckWatch(
            config.ranks,
            config.step_budget_s,
            ask=self._ask_for_stacks,
            signal=self._signal_for_stacks,
            fail=self._on_stuck,
        )

    # -- life ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the ranks; returns at once. RuntimeError when it was started before."""
        config = self._config
        if self._group is not None:
            raise RuntimeError(f"replica {self._name} was started before")
        with ExitStack() as ours, ExitStack() as theirs:
            socks, specs = describe(config, self._name, self._target, ours, theirs)
            channels: list[Channel[FromRank]] = [Channel(sock, FromRank) for sock in socks]
            graces = Escalation(config.drain_s, config.terminate_s, config.kill_s)
            group = self._new_group(specs, graces)
            group.on_failure(self._on_group_failure)
            group.start()
            self._group = group
            self._channels = channels
            self._pump = Pump(
                self._name,
                channels,
                on_message=self._on_message,
                on_lost=self._on_lost,
                next_due=self._next_due,
                on_due=self._on_due,
            )
            ours.pop_all()  # the pump's now

    def _new_group(self, specs: Sequence[WorkerSpec], escalation: Escalation) -> Ranks:
        return WorkerGroup(
            self._name,
            specs,
            escalation=escalation,
            supervisor=self._supervisor,
            start_s=self._config.start_s,
        )

    def wait_ready(self, by: Deadline) -> ModelInfo:
        """Wait until every rank is ready; `StartupError` names the one that failed."""
        group = self._started()
        group.wait_ready(by)
        return msgspec.convert(group.workers[0].info, ModelInfo)

    def shutdown(
        self, by: Deadline | None = None, *, first: Action = Action.DRAIN
    ) -> ShutdownReport:
        """Stop the ranks; idempotent, joins a stop in progress. Pending calls end first.

        They end with the replica's cause, or with `Draining`. A later call takes survivors up
        again.
        """
        group = self._started()
        ended = self._calls.close(self._fault.error or Draining("the server is stopping"))
        for call_id in ended:
            self.cancel(call_id)  # so that no rank spends its drain on what nobody waits for
        try:
            return group.shutdown(by, first=first)
        finally:
            # Also when the caller was interrupted: the ranks then see the end of their channel.
            if self._pump is not None and not self._pump.end(_PUMP_END_S):
                _log.warning("replica %s: the pump is held up by a callback", self._name)

    def kill(self) -> None:
        """Shorten a stop to SIGKILL now."""
        self._started().kill()

    def _started(self) -> Ranks:
        if self._group is None:
            raise RuntimeError(f"replica {self._name} was never started")
        return self._group

    # -- calls -----------------------------------------------------------------------------

    def call(
        self,
        method: str,
        params: Any,
        *,
        ranks: Literal["all", "first"] = "all",
        deadline: Deadline | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> CallHandle:
        """Run `method` in the ranks; see `Executor.call`."""
        by = Deadline.never() if deadline is None else deadline
        handle = self._calls.begin(ranks, by, on_progress)
        if handle.future.done():
            return handle
        left_s = None if math.isinf(by.at_s) else by.left_s()
        try:
            self._send_to_all(Call(id=handle.id, method=method, params=params, left_s=left_s))
        except ChannelClosed:
            return handle  # the rank's death, or the suspicion, ends the future
        except EngineError as error:
            self._calls.fail(handle.id, error)
        except (WireError, OSError) as error:
            self._calls.fail(handle.id, EngineError(f"the call cannot be sent: {error}"))
        except BaseException:
            self._calls.fail(handle.id, EngineError("the call cannot be sent"))
            raise
        self._look_again(min(by.at_s, self._watch.due_s))
        return handle

    def ask(
        self,
        method: str,
        params: Any,
        *,
        ranks: Literal["all", "first"] = "all",
        deadline: Deadline | None = None,
    ) -> list[RankOutcome]:
        """Call and wait for the outcomes; see `Executor.ask`."""
        pump = self._pump
        if pump is None or not pump.borrow():
            return self.call(method, params, ranks=ranks, deadline=deadline).future.result()
        try:
            future = self.call(method, params, ranks=ranks, deadline=deadline).future
            pump.read_until(future)
        finally:
            pump.give_back()
        return future.result()

    def _look_again(self, due_s: float = -math.inf) -> None:
        if self._pump is not None:
            self._pump.look_again(due_s)

    def _send_to_all(self, message: Call) -> None:
        """Put a call to every rank or to none: a rank that missed one would sit alone in it."""
        if not self._channels:
            raise EngineError(f"replica {self._name} was never started")
        unsent: list[Frame] = []
        try:
            # Each rank's own: descriptors go with a frame, and the kernel takes them once.
            for channel in self._channels:
                unsent.append(channel.frame(message))  # noqa: PERF401  (closed when one fails)
            with self._send_lock:
                if not all(channel.has_room for channel in self._channels):
                    raise Overloaded(f"replica {self._name} does not read its calls")
                self._watch.silence.owe(message.id, time.monotonic())
                frames, unsent = unsent, []
                for channel, frame in zip(self._channels, frames, strict=True):
                    channel.post(frame)
        finally:
            for frame in unsent:
                frame.close()
        self._flush_later()

    def cancel(self, call_id: int) -> None:
        """Give up a call at its next step, on all ranks together; the future still ends."""
        # Full: it has not read the call either. Closed: it is dead.
        self._tell(Cancel(id=call_id))

    def hold(self, call_id: int) -> None:
        """Have a call make no step until `resume`; see `Executor.hold`."""
        self._tell(Hold(id=call_id))

    def resume(self, call_id: int) -> bool:
        """Go on with a call on hold; False when a rank cannot be told."""
        return self._tell(Resume(id=call_id))

    def _tell(self, message: Cancel | Hold | Resume) -> bool:
        told = True
        with self._send_lock:
            for channel in self._channels:
                try:
                    channel.send(message)
                except WireError:
                    told = False
        self._flush_later()
        return told

    def _flush_later(self) -> None:
        if not all(channel.idle for channel in self._channels):
            self._look_again()

    # -- faults ----------------------------------------------------------------------------

    def on_failure(self, callback: Callable[[Cause], None]) -> None:
        """Have `callback` called once, at once, with the first cause; a late one is replayed."""
        self._fault.on_failure(callback)

    def lost(self) -> WorkerLost | None:
        """Give what requests end with since the replica has a cause; None before."""
        return self._fault.error

    def _on_group_failure(self, cause: Cause) -> None:
        """Latch the first cause, end every call with it, tell whoever asked; any thread."""
        kind = RequestStuck if cause.what == self._stuck else WorkerLost
        error = kind(str(cause))
        if self._fault.latch(cause, error):
            self._calls.close(error)
            self._fault.tell()

    def _fail(self, rank: int, what: str) -> None:
        """Declare a rank at fault; its group comes back with the cause, and ends itself."""
        group = self._started()
        group.fail(group.workers[rank].name, what)

    def _on_lost(self, rank: int, what: str) -> None:
        if self._suspect is None and not self._calls.closed:
            due_s = time.monotonic() + _SUSPECT_S
            self._suspect = (due_s, rank, what)
            self._look_again(due_s)

    # -- the reader, and what is due -------------------------------------------------------

    def _on_message(self, rank: int, message: FromRank) -> None:
        now = self._heard_s[rank] = time.monotonic()
        if isinstance(message, Dumped):
            self._watch.dumped(rank, now)
            self._look_again(self._watch.due_s)
            return
        self._watch.heard(rank, now, None if isinstance(message, Progress) else message.id)
        if isinstance(message, Progress):
            if rank == 0:
                self._calls.progress(message.id, message.step, message.steps)
        elif isinstance(message, Failure) and message.kind == PEER_LOST:
            # The peer's death is the cause, not this echo of it, which can be faster.
            self._on_lost(rank, message.message)
        else:
            self._calls.settle(message.id, outcome_of(rank, message))

    def _next_due(self) -> float:
        suspected = math.inf if self._suspect is None else self._suspect[0]
        watched = math.inf if self._calls.closed else self._watch.due_s
        return min(self._calls.next_deadline(), suspected, watched)

    def _on_due(self) -> None:
        for call_id in self._calls.expire():
            self.cancel(call_id)
        if self._suspect is not None and time.monotonic() >= self._suspect[0]:
            _, rank, what = self._suspect
            self._suspect = None
            self._fail(rank, what)
        if not self._calls.closed:
            self._watch.act(time.monotonic())

    def _ask_for_stacks(self) -> None:
        for channel in self._channels:
            with suppress(WireError):  # full or closed: then it will not answer
                channel.send(Dump())

    def _signal_for_stacks(self, rank: int) -> None:
        group = self._started()
        group.signal(group.workers[rank].name, DUMP_SIGNAL)

    def _on_stuck(self, rank: int, what: str) -> None:
        self._stuck = what
        self._fail(rank, what)

    # -- state -----------------------------------------------------------------------------

    def status(self) -> ReplicaStatus:
        """Say how the replica is; reads state, asks nobody."""
        return status_of(self._name, self._group, self._fault.cause, self._heard_s)
