"""WorkerGroup: the object people use."""

from __future__ import annotations

import _thread
import math
import os
import threading
import time
from typing import TYPE_CHECKING

from stopbath.lifecycle._core import GroupCore, Policy
from stopbath.lifecycle._deadline import Deadline
from stopbath.lifecycle._errors import (
    Cause,
    LifecycleError,
    NotStarted,
    StartupError,
)
from stopbath.lifecycle._escalation import Action, Escalation
from stopbath.lifecycle._shared import SHARED
from stopbath.lifecycle._state import GroupState
from stopbath.lifecycle._view import WorkerView

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from typing import Self

    from stopbath.lifecycle._adopt import Existing
    from stopbath.lifecycle._member import Member
    from stopbath.lifecycle._report import ShutdownReport, Survivor
    from stopbath.lifecycle._spec import WorkerSpec
    from stopbath.lifecycle._supervisor import Supervisor

__all__ = ["Policy", "WorkerGroup", "WorkerView"]

_LET_GO_S = 0.02  # for the keeper to leave, of the tenth of a second beyond a deadline
_ANSWER_S = 2.0  # for the supervisor's thread to answer, beyond the deadline it works to


class WorkerGroup:
    """Workers that are started, watched and stopped together.

    Methods are safe from any thread, callbacks included. Used as a context manager it starts,
    waits until ready (for at most `start_cap_s`) and always stops.

    Args:
        name: The group's name in reports.
        specs: One `WorkerSpec` per worker; or `Existing` processes, see `adopt`.
        escalation: The steps of a stop.
        policy: What the death of one means for the others.
        start_s: How long a starting worker may say nothing (seconds); every `ctx.progress`
            begins the budget anew.
        start_cap_s: How long a start may take in all (seconds), whatever is said.
        supervisor: Whose loop drives the group; by default the one this process shares.
    """

    def __init__(
        self,
        name: str,
        specs: Sequence[WorkerSpec | Existing],
        *,
        escalation: Escalation | None = None,
        policy: Policy = Policy.ONE_FOR_ALL,
        start_s: float = 300.0,
        start_cap_s: float = 3600.0,
        supervisor: Supervisor | None = None,
    ) -> None:
        if not specs:
            raise ValueError(f"group {name!r} needs at least one worker")
        for what, budget in (("start_s", start_s), ("start_cap_s", start_cap_s)):
            if math.isnan(budget) or budget <= 0:
                raise ValueError(f"{what} must be a number of seconds > 0, not {budget!r}")
        self.name = name
        self.escalation = escalation or Escalation()
        self._core = GroupCore(
            name,
            [spec.member(spec.name or f"{name}{i}", i) for i, spec in enumerate(specs)],
            escalation=self.escalation,
            policy=policy,
            start_s=start_s,
            start_cap_s=start_cap_s,
        )
        names = [member.name for member in self._core.members]
        if len(set(names)) != len(names):
            raise ValueError(f"the workers of group {name!r} need different names: {names}")
        self._start_cap_s = start_cap_s
        self._given = supervisor
        self._supervisor: Supervisor | None = None
        self._owner_pid = os.getpid()
        self._early: list[Callable[[Cause], None]] = []

    # -- what it is

    @property
    def state(self) -> GroupState:
        """Where the group is in its life."""
        return self._core.state

    @property
    def cause(self) -> Cause | None:
        """The first fault, once there was one."""
        return self._core.cause

    @property
    def workers(self) -> tuple[WorkerView, ...]:
        """The workers, by rank."""
        return tuple(WorkerView(member) for member in self._core.members)

    @property
    def survivors(self) -> tuple[Survivor, ...]:
        """What is still alive after a stop, with the evidence of now."""
        return tuple(self._core.survivors())

    @property
    def report(self) -> ShutdownReport | None:
        """The account of the last stop."""
        return self._core.report

    def __repr__(self) -> str:
        return f"<WorkerGroup {self.name} {self.state.value}: {list(self.workers)}>"

    # -- start

    def start(self) -> None:
        """Start every worker; returns at once. `LifecycleError` when it was started before."""
        self._check_owner()
        if self._supervisor is not None or self.state is not GroupState.NEW:
            raise LifecycleError(f"group {self.name!r} was started before")
        supervisor = self._given or SHARED.acquire(self)
        self._supervisor = supervisor
        waiter = _Waiter()
        core, early = self._core, list(self._early)

        def begin() -> None:
            for callback in early:
                core.on_failure(callback)
            try:
                supervisor.add(core)
            finally:
                waiter.wake()

        supervisor.post(begin)
        # The descriptors in the specs are the caller's again once they have been duplicated.
        waiter.wait(Deadline.after(_ANSWER_S))

    def wait_ready(self, by: Deadline) -> None:
        """Wait until every worker has said ready.

        `StartupError` when one failed, ended or was too late; its peers are gone by then.
        """
        supervisor, core = self._running(), self._core
        if not core.over:
            waiter = _Waiter()
            supervisor.post(lambda: core.when_ready(waiter.wake))
            try:
                if not waiter.wait(by):
                    supervisor.post(core.start_overdue)
                    waiter.wait(Deadline.after(self._longest_stop_s()))
            except BaseException:
                self.shutdown(first=Action.SIGTERM)
                raise
        if self.state is not GroupState.READY:
            report = self.shutdown()
            nobody = Cause(self.name, None, "starting", "was stopped", None, ())
            raise StartupError(self.cause or nobody, report)

    def on_failure(self, callback: Callable[[Cause], None]) -> None:
        """Have `callback` called once, at once, with the first fault; a late one is replayed.

        It runs on a thread of its own and may call `shutdown()`.
        """
        if self._supervisor is None:
            self._early.append(callback)
        else:
            core = self._core
            self._supervisor.post(lambda: core.on_failure(callback))

    def fail(self, worker: str, what: str) -> None:
        """Declare a living worker at fault, as its death would be; does not wait.

        For whoever sees what no process table shows: a worker that lives and does nothing.
        `what` says it in one line without the worker's name. `LookupError` for an unknown name.
        """
        core, member = self._core, self._member_called(worker)
        self._running().post(lambda: core.fault(member, what) if member.alive else None)

    def signal(self, worker: str, number: int) -> None:
        """Send a signal to a worker by identity; nothing when it is gone. Does not wait.

        For signals that ask (a stack dump): whoever ends, ends through `shutdown`.
        """
        member = self._member_called(worker)

        def send() -> None:
            if member.alive and member.ref is not None:
                member.ref.send(number)

        self._running().post(send)

    def _member_called(self, name: str) -> Member:
        for member in self._core.members:
            if member.name == name:
                return member
        raise LookupError(f"group {self.name!r} has no worker {name!r}")

    # -- stop

    def shutdown(
        self, deadline: Deadline | None = None, *, first: Action = Action.DRAIN
    ) -> ShutdownReport:
        """Stop every worker and give the account of it; returns by `deadline` + 100 ms.

        Idempotent. A second caller joins the stop in progress, and an earlier deadline or a
        harsher `first` step only shortens it. Called again with survivors, it takes them up
        again. A KeyboardInterrupt shortens the stop to SIGKILL and is raised when it is over.
        `NotStarted` when there was never anything to stop.
        """
        supervisor, core = self._running(), self._core
        at_s = math.inf if deadline is None else deadline.at_s
        if core.state is GroupState.STOPPED and core.report is not None:
            self._let_go(supervisor, at_s)
            return core.report
        waiter = _Waiter()
        supervisor.post(lambda: core.stop(first, at_s, "shutdown()", waiter.wake))
        interrupted: BaseException | None = None
        wait = Deadline.after(self._longest_stop_s())
        limit = wait if deadline is None else Deadline(max(at_s, time.monotonic()) + _ANSWER_S)
        while True:
            try:
                if waiter.wait(limit):
                    break
                raise LifecycleError(f"the supervisor of group {self.name!r} does not answer")
            except KeyboardInterrupt as error:
                interrupted = error
                self.kill()
        if core.report is None:
            raise LifecycleError(f"group {self.name!r} has stopped without an account")
        report = core.report
        if core.state is GroupState.STOPPED:
            self._let_go(supervisor, at_s)
        if interrupted is not None:
            raise interrupted
        return report

    def begin_shutdown(self) -> None:
        """Begin a stop, unless there is one; does not wait."""
        if self._supervisor is not None:
            core = self._core
            self._supervisor.post(lambda: core.stop(Action.DRAIN, math.inf, "interpreter exit"))

    def kill(self) -> None:
        """Shorten a stop to SIGKILL now, or begin one with it; does not wait."""
        supervisor, core = self._running(), self._core
        if not core.over:
            supervisor.post(lambda: core.stop(Action.SIGKILL, math.inf, "kill()"))

    def _let_go(self, supervisor: Supervisor, at_s: float) -> None:
        """Give back what the group held; once, however often it is stopped."""
        core = self._core
        supervisor.post(lambda: supervisor.drop(core))
        if self._given is None:
            by = Deadline(max(at_s, time.monotonic()) + _LET_GO_S)
            SHARED.release(self, supervisor, by)

    def _longest_stop_s(self) -> float:
        budget = max(member.budget_s for member in self._core.members)
        return self.escalation.total_s + budget + 60.0  # 60: the teardown of 300 GiB

    def _running(self) -> Supervisor:
        if self._supervisor is None:
            raise NotStarted(f"group {self.name!r} was never started")
        self._check_owner()
        return self._supervisor

    def _check_owner(self) -> None:
        if os.getpid() != self._owner_pid:
            raise LifecycleError(
                f"group {self.name!r} belongs to process {self._owner_pid}: "
                "a forked child owns nothing"
            )

    def __enter__(self) -> Self:
        self.start()
        self.wait_ready(Deadline.after(self._start_cap_s))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() == self._owner_pid:
            self.shutdown()


class _Waiter:
    """One thread's wait for the supervisor's word.

    A bare lock: the supervisor only ever releases it, so that no interrupt of the waiting
    thread can leave anything behind that the supervisor could hang on.
    """

    __slots__ = ("_lock", "_woken")

    def __init__(self) -> None:
        self._woken = False  # an interrupt may come between the lock's word and ours
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def wake(self) -> None:
        """End the wait; called once, on the supervisor's thread."""
        self._woken = True
        self._lock.release()

    def wait(self, by: Deadline) -> bool:
        """Wait for the word until `by`; whether it came."""
        left = min(by.left_s(), threading.TIMEOUT_MAX)
        return self._woken or self._lock.acquire(timeout=left)
