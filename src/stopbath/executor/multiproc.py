"""The executor of one machine: K ranks in a worker group, one data channel to each."""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from stopbath.errors import Draining, EngineError, Overloaded, WorkerLost
from stopbath.executor._calls import CallTable
from stopbath.executor._pump import Pump
from stopbath.executor._ranks import TARGET, describe
from stopbath.executor.base import RankOutcome, RankStatus, ReplicaStatus
from stopbath.lifecycle import Action, Cause, Deadline, Escalation, GroupState, WorkerGroup
from stopbath.messages import PEER_LOST, Call, Cancel, Failure, FromRank, ModelInfo, Progress
from stopbath.wire import Channel, ChannelClosed, WireError

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopbath.config import ServeConfig
    from stopbath.executor.base import CallHandle
    from stopbath.lifecycle import ShutdownReport, Supervisor

__all__ = ["MultiprocExecutor"]

_log = logging.getLogger("stopbath.executor")

# A rank's channel ends some milliseconds before or after its death is seen. The death is the
# better cause, so the end of a channel alone counts only when no death follows.
_SUSPECT_S: Final = 5.0
_PUMP_END_S: Final = 2.0


class MultiprocExecutor:
    """One replica of K ranks on this machine; implements `Executor`.

    Every rank gets one end of a socketpair; with several ranks also a memfd at which
    torch.distributed meets (see `stopbath.worker.ranks.join`): neither has a name that could be
    left behind. One thread (the pump) reads all channels.

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
        self._state_lock = threading.Lock()
        self._group: WorkerGroup | None = None
        self._pump: Pump | None = None
        self._channels: list[Channel[FromRank]] = []
        self._heard_s: list[float | None] = [None] * config.ranks
        self._suspect: tuple[float, int, str] | None = None  # due, rank, what
        self._cause: Cause | None = None
        self._callbacks: list[Callable[[Cause], None]] = []

    # -- life ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the ranks; returns at once. RuntimeError when it was started before."""
        config = self._config
        if self._group is not None:
            raise RuntimeError(f"replica {self._name} was started before")
        with ExitStack() as ours, ExitStack() as theirs:
            socks, specs = describe(config, self._target, ours, theirs)
            channels: list[Channel[FromRank]] = [Channel(sock, FromRank) for sock in socks]
            group = WorkerGroup(
                self._name,
                specs,
                escalation=Escalation(config.drain_s, config.terminate_s, config.kill_s),
                supervisor=self._supervisor,
                start_s=config.start_s,
            )
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
        cause = self._cause
        ended = self._calls.close(
            Draining("the server is stopping") if cause is None else _worker_lost(cause)
        )
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

    def _started(self) -> WorkerGroup:
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
        if self._pump is not None:
            self._pump.look_again(by.at_s)
        return handle

    def _send_to_all(self, message: Call) -> None:
        """Put a call to every rank or to none: a rank that missed one would sit alone in it."""
        if not self._channels:
            raise EngineError(f"replica {self._name} was never started")
        with ExitStack() as unsent:
            frames = []
            for channel in self._channels:
                frames.append(channel.frame(message))
                unsent.callback(frames[-1].close)
            with self._send_lock:
                if not all(channel.has_room for channel in self._channels):
                    raise Overloaded(f"replica {self._name} does not read its calls")
                unsent.pop_all()
                for channel, frame in zip(self._channels, frames, strict=True):
                    channel.post(frame)
        self._flush_later()

    def cancel(self, call_id: int) -> None:
        """Give up a call at its next step, on all ranks together; the future still ends."""
        with self._send_lock:
            for channel in self._channels:
                try:
                    channel.send(Cancel(id=call_id))
                except WireError:
                    continue  # full: it has not read the call either; closed: it is dead
        self._flush_later()

    def _flush_later(self) -> None:
        if self._pump is not None and not all(channel.idle for channel in self._channels):
            self._pump.look_again()

    # -- faults ----------------------------------------------------------------------------

    def on_failure(self, callback: Callable[[Cause], None]) -> None:
        """Have `callback` called once, at once, with the first cause; a late one is replayed."""
        with self._state_lock:
            cause = self._cause
            if cause is None:
                self._callbacks.append(callback)
        if cause is not None:
            callback(cause)

    def _on_group_failure(self, cause: Cause) -> None:
        """Latch the first cause, end every call with it, tell whoever asked; any thread."""
        with self._state_lock:
            if self._cause is not None:
                return
            self._cause = cause
            callbacks, self._callbacks = self._callbacks, []
        self._calls.close(_worker_lost(cause))
        for callback in callbacks:
            try:
                callback(cause)
            except Exception:  # noqa: BLE001  (the others still have to hear of it)
                _log.exception("an on_failure callback of replica %s raised", self._name)

    def _on_lost(self, rank: int, what: str) -> None:
        if self._suspect is None and not self._calls.closed:
            self._suspect = (time.monotonic() + _SUSPECT_S, rank, what)

    # -- the pump's thread -----------------------------------------------------------------

    def _on_message(self, rank: int, message: FromRank) -> None:
        self._heard_s[rank] = time.monotonic()
        if isinstance(message, Progress):
            self._calls.progress(message.id, message.step, message.steps)
        elif isinstance(message, Failure):
            if message.kind == PEER_LOST:
                # The peer's death is the cause, not this echo of it, which can be faster.
                self._on_lost(rank, message.message)
                return
            outcome = RankOutcome(
                rank,
                error_kind=message.kind,
                error_message=message.message,
                traceback=message.traceback,
            )
            self._calls.settle(message.id, outcome)
        else:
            self._calls.settle(message.id, RankOutcome(rank, message.value))

    def _next_due(self) -> float:
        suspected = math.inf if self._suspect is None else self._suspect[0]
        return min(self._calls.next_deadline(), suspected)

    def _on_due(self) -> None:
        for call_id in self._calls.expire():
            self.cancel(call_id)
        if self._suspect is not None and time.monotonic() >= self._suspect[0]:
            _, rank, what = self._suspect
            self._suspect = None
            pid = self._started().workers[rank].pid
            self._on_group_failure(Cause(f"rank{rank}", pid, "serving", what, None, ()))

    # -- state -----------------------------------------------------------------------------

    def status(self) -> ReplicaStatus:
        """Say how the replica is; reads state, asks nobody."""
        group = self._group
        cause = self._cause
        if group is None:
            return ReplicaStatus(self._name, GroupState.NEW, cause, ())
        ranks = tuple(
            RankStatus(
                name=worker.name,
                rank=rank,
                pid=worker.pid,
                state=worker.state,
                last_progress_s=self._last_progress_s(rank, worker.last_progress_s),
            )
            for rank, worker in enumerate(group.workers)
        )
        return ReplicaStatus(self._name, group.state, cause or group.cause, ranks)

    def _last_progress_s(self, rank: int, said_s: float | None) -> float | None:
        heard = self._heard_s[rank]
        if heard is None:
            return said_s
        answered_s = time.monotonic() - heard
        return answered_s if said_s is None else min(said_s, answered_s)


def _worker_lost(cause: Cause) -> WorkerLost:
    return WorkerLost(str(cause))
