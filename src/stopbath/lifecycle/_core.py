"""One group as its supervisor drives it: what happens to its workers, and what follows.

Everything here runs on the supervisor's thread. Other threads read fields and post commands.
"""

from __future__ import annotations

import contextlib
import enum
import math
import time
from typing import TYPE_CHECKING, Any

from stopbath.lifecycle._errors import (
    LOST_KEEPER,
    Cause,
    Exit,
    KeeperDied,
    ProtocolError,
    describe_exception,
)
from stopbath.lifecycle._escalation import Action
from stopbath.lifecycle._evidence import survivor_of
from stopbath.lifecycle._process import memory_gib, peek_exit
from stopbath.lifecycle._report import ShutdownReport
from stopbath.lifecycle._state import (
    GROUP_TRANSITIONS,
    GroupEvent,
    GroupState,
    WorkerEvent,
    WorkerState,
    next_state,
)
from stopbath.lifecycle._stop import Stop
from stopbath.lifecycle._words import forward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stopbath.lifecycle._channel import Frame
    from stopbath.lifecycle._escalation import Escalation
    from stopbath.lifecycle._member import Member
    from stopbath.lifecycle._process import ProcessRef
    from stopbath.lifecycle._report import Survivor
    from stopbath.lifecycle._spawn import KeeperClient
    from stopbath.lifecycle._supervisor import Supervisor

__all__ = ["GroupCore", "Policy"]

_STATUS_WAIT_S = 0.1  # for the keeper's word on a status, after the pidfd said dead
_TEARDOWN_S_PER_GIB = 0.2


class Policy(enum.Enum):
    """What the death of one worker means for the others."""

    ONE_FOR_ALL = "one_for_all"  # they live and die together
    INDEPENDENT = "independent"


class GroupCore:
    """State and decisions of one group."""

    def __init__(
        self,
        name: str,
        members: Sequence[Member],
        *,
        escalation: Escalation,
        policy: Policy,
        start_s: float,
        start_cap_s: float,
    ) -> None:
        self.name, self.escalation, self.policy = name, escalation, policy
        self.state = GroupState.NEW
        self.members = list(members)
        self.cause: Cause | None = None
        self.report: ShutdownReport | None = None
        self.was_ready = False
        self._start_s, self._start_cap_s = start_s, start_cap_s
        self._sup: Supervisor | None = None
        self._callbacks: list[Callable[[Cause], None]] = []
        self._ready_waiters: list[Callable[[], None]] = []
        self._over_waiters: list[Callable[[], None]] = []
        self._stop: Stop | None = None
        self._began_wall = ""
        self._linger_s: float | None = None
        self._strays: list[dict[str, Any]] = []
        self._strays_left: dict[int, list[Frame]] = {}  # by the spawn id of who left them

    @property
    def over(self) -> bool:
        """Whether a stop has run to its end."""
        return self.state in {GroupState.STOPPED, GroupState.SURVIVED}

    def survivors(self) -> list[Survivor]:
        """Give what is alive after the last step, as /proc shows it now."""
        found = [m.survivor() for m in self.members if m.state is WorkerState.SURVIVED and m.pid]
        if self.state is GroupState.SURVIVED:
            left = {it["pid"]: it for some in self._strays_left.values() for it in some}
            found += [survivor_of(pid, it["argv"], "SIGKILL") for pid, it in left.items()]
        return found

    def _move(self, event: GroupEvent) -> None:
        self.state = next_state(GROUP_TRANSITIONS, f"group {self.name}", self.state, event)

    # -- start

    def start(self, sup: Supervisor) -> None:
        """Ask for every worker. One that cannot even be asked for is the group's first fault."""
        self._sup = sup
        self._move(GroupEvent.START)
        failed: list[tuple[Member, str]] = []
        for member in self.members:
            try:
                member.ask_for(sup.keeper, time.monotonic())
                sup.watch_words(self, member)
                if member.ref is not None:  # it runs already
                    self.spawned(member, member.ref)
            except Exception as error:  # EMFILE, a dead keeper: the start fails, in order
                failed.append((member, describe_exception(error)))
                if member.kept:  # no need to start the others; those that run are taken hold of
                    break
        for member, why in failed:
            self._spawn_failed(member, why)

    def spawned(self, member: Member, ref: ProcessRef) -> None:
        """The keeper has started a worker."""
        assert self._sup is not None
        member.born(ref)
        self._sup.watch_death(self, member)
        if self.state in {GroupState.STOPPING, GroupState.SURVIVED}:  # nothing to drain yet
            assert self._stop is not None
            action = max(self._stop.applied or Action.DRAIN, Action.SIGTERM)
            member.act(action, time.monotonic(), 0.0)
            return
        try:
            member.let_go_on()
        except Exception as error:  # a target that does not pickle
            self.fault(member, f"cannot be given its target: {describe_exception(error)}")
        if member.state is WorkerState.READY:  # a command is, as soon as it runs
            self._ready_if_all_are()

    def spawn_failed(self, member: Member, errno: int, why: str) -> None:
        """The keeper could not start a worker."""
        member.spawn_errno = errno
        self._spawn_failed(member, why)

    def _spawn_failed(self, member: Member, why: str) -> None:
        if member.unborn:
            member.move(WorkerEvent.SPAWN_FAILED)
        member.ended_at = time.monotonic()
        self.fault(member, f"could not be started: {why}")
        self._finish_if_ended()

    def frame(self, member: Member, frame: Frame) -> None:
        """Act on what a worker said; a child it forked may still speak for a dead one."""
        if not member.alive:
            return
        member.heard_at = time.monotonic()
        kind = frame.get("t")
        if kind == "progress":
            member.move(WorkerEvent.PROGRESS)
            member.phase = str(frame["message"])
        elif kind == "ready":
            member.info = frame["info"]
            member.phase = "running"
            member.move(WorkerEvent.READY)
            self._ready_if_all_are()
        elif kind == "failed":
            member.phase = str(frame["phase"])
            member.leaving = True
            self.fault(member, str(frame["what"]))
        elif kind == "budget":
            budget_s = float(frame["stop_s"])
            member.budget_s = budget_s if math.isfinite(budget_s) else 0.0
            if self._stop is not None:
                self._stop.wait_longer(member.budget_s)
        elif kind == "report":
            member.reports.append(frame["report"])

    def _ready_if_all_are(self) -> None:
        if all(m.state is WorkerState.READY for m in self.members):
            self._move(GroupEvent.ALL_READY)
            self.was_ready = True
            self._release(self._ready_waiters)

    # -- faults

    def fault(self, member: Member, what: str) -> None:
        """Latch the first fault, tell everybody at once, and end what lives and dies with it."""
        if self.state is GroupState.STOPPING or self.over:
            return
        self._latch(member, what)
        if self.policy is Policy.ONE_FOR_ALL or self.state is GroupState.STARTING:
            self.stop(Action.SIGTERM, math.inf, "a fault")

    def _latch(self, member: Member, what: str) -> None:
        if self.cause is None:
            assert self._sup is not None
            forward(member.words.read())
            self.cause = Cause(
                member.name, member.pid, member.phase, what, member.exit, member.words.last()
            )
            for callback in self._callbacks:
                self._sup.call_later(callback, self.cause)
            self._callbacks.clear()

    def keeper_died(self) -> None:
        """Nothing can be started any more, and the kernel is ending what it kept."""
        for member in self.members:
            if not member.kept:
                continue
            if member.alive:
                self.fault(member, LOST_KEEPER)
            if member.status_due is not None:
                self._ended_untold(member, time.monotonic())
            if member.unborn:
                member.exit = Exit()
                self._spawn_failed(member, "the keeper died")
            elif member.state is WorkerState.EXITED:
                self.gone(member, [])
        if any(m.kept and m.alive for m in self.members):
            # The kernel does not end all that the keeper kept: a command, a worker that changed
            # its uid. Graces would be as many seconds in which nobody holds what these started.
            self.stop(Action.SIGKILL, math.inf, "the end of the keeper")

    def on_failure(self, callback: Callable[[Cause], None]) -> None:
        """Register a callback; one that comes late is told at once."""
        if self.cause is None:
            self._callbacks.append(callback)
        elif self._sup is not None:
            self._sup.call_later(callback, self.cause)

    # -- ends

    def died(self, member: Member, now: float) -> None:
        """The pidfd says dead: take its last words, then wait shortly for its status."""
        assert self._sup is not None
        self._sup.unwatch_death(member)
        self._sup.hear_out(self, member)
        if not member.kept:
            member.exit = member.own_status()
        if member.exit is not None:
            self._ended(member, now)
        elif self._sup.keeper.channel.eof:
            self._ended_untold(member, now)
        else:
            member.status_due = now + _STATUS_WAIT_S

    def _ended_untold(self, member: Member, now: float) -> None:
        """Take the status ourselves: when the keeper died, a subreaper has adopted it."""
        assert member.ref is not None
        try:
            member.exit = peek_exit(member.ref) or Exit()
        except ChildProcessError:
            member.exit = Exit()
        self._ended(member, now)

    def status(self, member: Member, end: Exit, now: float) -> None:
        """The keeper says how it ended; this may come before or after the pidfd."""
        waited = member.status_due is not None
        first = member.exit is None
        member.exit = end
        if waited:
            self._ended(member, now)
        elif first and member.ref is not None and member.alive:
            self.died(member, now)

    def _ended(self, member: Member, now: float) -> None:
        asked = member.state in {WorkerState.STOPPING, WorkerState.SURVIVED}
        member.ended(now)
        if self.cause is not None and member.leaving and self.cause.is_of(member.name, member.pid):
            self.cause = self.cause._replace(exit=member.exit)  # it said why before it ended
        if not asked and member.exit is not None:
            what = member.fault_of(member.exit)
            if self.state is GroupState.STOPPING:  # it was dead before, and is told of only now
                if what is not None:
                    self._latch(member, what)
                if self.policy is Policy.ONE_FOR_ALL:
                    self.stop(Action.SIGTERM, math.inf, "")
            elif what is not None:
                self.fault(member, what)
            else:  # in order; what it left behind may linger, then it is not
                self._linger_s = member.linger_s
                self.stop(Action.DRAIN, math.inf, f"the end of {member.name}")
        elif member.reachable:  # its strays need no drain
            self.stop(Action.SIGTERM, math.inf, "")
        if not member.kept or (self._sup is not None and self._sup.keeper.channel.eof):
            self.gone(member, [])  # nobody will tell
        else:
            self._finish_if_ended()

    def gone(self, member: Member, strays: list[dict[str, Any]]) -> None:
        """The keeper has reaped it and ended whatever it left."""
        assert self._sup is not None
        self._strays += strays
        if member.alive:  # the word about the end was lost: this one is as good
            self.status(member, member.exit or Exit(), time.monotonic())
            if member.status_due is not None or member.alive:
                return
        member.move(WorkerEvent.GONE)
        self._strays_left.pop(member.spawn_id, None)
        self._sup.unwatch_words(member)
        member.close()
        self._finish_if_ended()

    def strays_left(self, spawn_id: int, left: list[Frame]) -> None:
        """The keeper names what a dead worker left and what has not ended yet.

        Negative numbers are those of the workers of our worker, as the guardian is told of them.
        """
        self._strays_left[spawn_id] = left

    def _finish_if_ended(self) -> None:
        if any(m.state is not WorkerState.GONE for m in self.members):
            return
        if self.state in {GroupState.STARTING, GroupState.READY}:  # INDEPENDENT, and all have ended
            self.stop(Action.SIGTERM, math.inf, "every worker ended")
        if self.state in {GroupState.STOPPING, GroupState.SURVIVED}:
            self._move(GroupEvent.ENDED)  # a survivor that has ended after all is told anew
            self._close()

    # -- stop

    def stop(
        self,
        first: Action,
        deadline: float,
        asked_by: str,
        done: Callable[[], None] | None = None,
    ) -> None:
        """Begin a stop, or join and at most shorten the one in progress; `done` when it is over."""
        now = time.monotonic()
        if self.state in {GroupState.STARTING, GroupState.READY}:
            self._look_for_the_dead(now)
        if self.state is GroupState.STOPPED or (self.state is GroupState.NEW and self._never_ran()):
            if done is not None:
                done()
            return
        if done is not None:
            self._over_waiters.append(done)
        if self.state is GroupState.STOPPING and self._stop is not None:
            self._stop.shorten(first, deadline, now)
        else:
            self._begin(first, deadline, asked_by, now)
        self.tick(now)

    def _never_ran(self) -> bool:
        self._move(GroupEvent.STOP)
        for member in self.members:
            member.move(WorkerEvent.STOP)
        self._close()
        return True

    def _begin(self, first: Action, deadline: float, asked_by: str, now: float) -> None:
        again = self.state is GroupState.SURVIVED
        self._move(GroupEvent.STOP)
        self._began_wall = _wall_clock()
        # Read now: the kill path opens nothing.
        memory = max((memory_gib(m.pid) for m in self.members if m.pid and m.alive), default=0.0)
        graces = self.escalation
        self._stop = Stop(
            graces if self._linger_s is None else graces.with_drain(self._linger_s),
            first=Action.SIGKILL if again else first,  # survivors have had every other step
            now=now,
            deadline=deadline,
            asked_by=asked_by,
            kill_extra_s=memory * _TEARDOWN_S_PER_GIB,
        )
        for member in self.members:
            self._stop.wait_longer(member.budget_s)
            if again and member.status_due is None:  # not one that has ended, untold
                member.sent = None
            if member.state is WorkerState.CREATED:
                member.move(WorkerEvent.STOP)
            elif member.unborn and self._sup is not None:
                self._call_off(member, self._sup.keeper)

    @staticmethod
    def _call_off(member: Member, keeper: KeeperClient) -> None:
        """It need not be born; whether it is all the same, the keeper says."""
        with contextlib.suppress(KeeperDied, ProtocolError):  # its end is an event of its own
            keeper.cancel(member.spawn_id)

    def _look_for_the_dead(self, now: float) -> None:
        """Who was dead before a stop began is a fault, whichever is heard of first."""
        for member in self.members:
            ref = member.ref if member.alive and member.status_due is None else None
            if ref is not None and ref.dead():
                self.died(member, now)

    def _apply(self, action: Action, within_s: float, now: float) -> None:
        if action > Action.DRAIN and self._sup is not None:
            self._sup.keeper.go_on()  # without it nobody is born, reaped or told of
        for member in self.members:
            if member.reachable and member.status_due is None:  # not one that is dead, untold
                try:
                    member.act(action, now, within_s)
                except Exception as error:  # one never stops the others
                    member.steps.append((action, now, repr(error)))

    def tick(self, now: float) -> float:
        """Do what is due; give the moment at which something is due next (monotonic seconds)."""
        due = math.inf
        for member in self.members:
            if member.status_due is not None:
                if member.status_due <= now:
                    self._ended_untold(member, now)
                else:
                    due = min(due, member.status_due)
        if self.state is GroupState.STARTING:
            due = min(due, self._check_start(now))
        if self.state is GroupState.STOPPING and self._stop is not None:
            action = self._stop.due(now)
            if action is not None:
                self._apply(action, max(0.0, self._stop.next_change(now) - now), now)
            if self._stop.over(now):
                self._outlived()
            else:
                due = min(due, self._stop.next_change(now))
        return due

    def _check_start(self, now: float) -> float:
        due = math.inf
        for member in self.members:
            if member.state not in {WorkerState.SPAWNING, WorkerState.STARTING}:
                continue
            limit = min(member.heard_at + self._start_s, member.started_at + self._start_cap_s)
            if limit <= now:
                self.start_overdue(member, now - member.heard_at)
                return math.inf
            due = min(due, limit)
        return due

    def start_overdue(self, member: Member | None = None, silent_s: float = 0.0) -> None:
        """Fail the start: by its own budget, or (no member given) at a caller's deadline."""
        if self.state is not GroupState.STARTING:
            return
        if member is not None:
            self.fault(member, f"was not ready: no progress for {silent_s:.1f} s")
            return
        late = [m for m in self.members if m.state is not WorkerState.READY]
        self.fault(min(late, key=lambda m: m.heard_at), "was not ready in time")

    def _outlived(self) -> None:
        for member in self.members:
            if member.status_due is not None:
                self._ended_untold(member, time.monotonic())
        if self.state is not GroupState.STOPPING:
            return
        for member in self.members:
            if member.state is not WorkerState.GONE:
                member.move(WorkerEvent.OUTLIVED)
        left = any(m.state is not WorkerState.GONE for m in self.members)
        left = left or any(self._strays_left.values())
        self._move(GroupEvent.OUTLIVED if left else GroupEvent.ENDED)
        self._close()

    def _close(self) -> None:
        self.report = self._account()
        if self.state is GroupState.STOPPED:
            for member in self.members:
                if self._sup is not None:
                    self._sup.unwatch(member)
                member.close()
        self._release(self._ready_waiters)
        self._release(self._over_waiters)

    def _account(self) -> ShutdownReport:
        now = time.monotonic()
        began = self._stop.began if self._stop is not None else now
        return ShutdownReport(
            group=self.name,
            cause=self.cause,
            asked_by=self._stop.asked_by if self._stop is not None else "nobody",
            started_at=self._began_wall or _wall_clock(),
            duration_s=now - began,
            workers=tuple(member.report(began) for member in self.members),
            strays=tuple(self._strays),
            survivors=tuple(self.survivors()),
        )

    # -- waiting

    def when_ready(self, done: Callable[[], None]) -> None:
        """Call `done` once the group is ready, or over."""
        if self.state in {GroupState.NEW, GroupState.STARTING, GroupState.STOPPING}:
            self._ready_waiters.append(done)
        else:
            done()

    def when_over(self, done: Callable[[], None]) -> None:
        """Call `done` once a stop, whoever begins it, is over; at once when it is already."""
        if self.over:
            done()
        else:
            self._over_waiters.append(done)

    @staticmethod
    def _release(waiters: list[Callable[[], None]]) -> None:
        for done in waiters:
            done()
        waiters.clear()


def _wall_clock() -> str:
    now = time.gmtime()  # for a person to read; nothing is decided by it
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", now)
