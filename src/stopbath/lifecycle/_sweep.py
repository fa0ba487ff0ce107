"""Ending what dead runs left: at the next start, and by `stopbath sweep`.

By identity only. `_leftovers` says what is provably a run's own; this acts on it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from stopbath.lifecycle._containment import remove_tree
from stopbath.lifecycle._deadline import Deadline
from stopbath.lifecycle._errors import say
from stopbath.lifecycle._leftovers import Left, is_cgroup_of, leftovers, resources_of
from stopbath.lifecycle._process import ProcessRef
from stopbath.lifecycle._runs import Claim, registered

if TYPE_CHECKING:
    from stopbath.lifecycle._registry import Record

__all__ = ["Swept", "remove_recorded", "sweep", "sweep_at_start", "sweep_own"]

_TERMINATE_S, _KILL_S = 2.0, 2.0
_REAPED_S, _LOOK_EVERY_S = 0.25, 0.005
_AT_START_S = 0.5  # somebody waits for a start; a dead run's processes have waited long enough


class Swept(NamedTuple):
    """What a sweep did about one dead run. `over`: nothing is left, its record is removed."""

    run_id: str
    name: str
    ended: tuple[dict[str, Any], ...]
    removed: tuple[str, ...]
    untouched: tuple[Left, ...]
    survivors: tuple[int, ...]
    over: bool

    def __str__(self) -> str:
        parts = []
        if self.ended:
            parts.append(f"{len(self.ended)} process{'es' if len(self.ended) > 1 else ''} ended")
        parts += [f"{what} removed" for what in self.removed]
        if self.survivors:
            parts.append(f"still alive: {', '.join(map(str, self.survivors))}")
        return (
            f"swept the dead run {self.name} ({self.run_id}): {', '.join(parts) or 'nothing left'}"
        )


def sweep(claim: Claim, *, terminate_s: float = _TERMINATE_S, kill_s: float = _KILL_S) -> Swept:
    """End and remove what a dead run left; bounded by the two graces.

    In passes, until one finds nothing new: what was forked meanwhile is found in the next.
    The record goes when nothing is left, and stays for the next sweep otherwise.
    """
    ended: dict[int, dict[str, Any]] = {}
    cgroups = [it["path"] for it in claim.run.resources if is_cgroup_of(claim.run, it)]
    survivors: list[int] = []
    by = Deadline.after(terminate_s + kill_s)
    kill_from = Deadline.after(terminate_s)
    while True:
        left = leftovers(claim.run)
        if not left.processes:
            survivors = []
            break
        if by.passed:
            survivors = [one.pid for one in left.processes]
            break
        if kill_from.passed and not any(one.pid for one in left.untouched):
            for path in cgroups:
                with contextlib.suppress(OSError), open(f"{path}/cgroup.kill", "wb") as file:
                    file.write(b"1")
        _end(left.processes, ended, kill_from, by)
    removed, kept = _remove_all([one.what for one in left.resources])
    over = not survivors and not left.untouched and not kept
    if over:
        claim.forget()
    else:
        claim.close()
    return Swept(
        claim.run.run_id,
        claim.run.name,
        tuple(it for pid, it in ended.items() if pid not in survivors),
        tuple(removed),
        (*left.untouched, *(Left(what, "what was in it is not reaped yet") for what in kept)),
        tuple(survivors),
        over,
    )


def _end(
    processes: tuple[Left, ...], ended: dict[int, dict[str, Any]], kill_from: Deadline, by: Deadline
) -> None:
    """One pass: signal every process, then wait for all of them together."""
    number = signal.SIGKILL if kill_from.passed else signal.SIGTERM
    refs: list[ProcessRef] = []
    for one in processes:
        try:
            ref = ProcessRef.open(one.pid, one.start)
        except OSError:  # has ended
            continue
        refs.append(ref)
        outcome = "killed" if number == signal.SIGKILL else "terminated"
        with contextlib.suppress(PermissionError):
            if ended.get(one.pid, {}).get("outcome") != outcome:
                ref.send(number)
                ref.send(signal.SIGCONT)  # a stopped process does not see SIGTERM otherwise
        ended[one.pid] = {"pid": one.pid, "argv": one.what, "outcome": outcome, "why": one.why}
    try:
        _await_all(refs, by if kill_from.passed else kill_from)
    finally:
        for ref in refs:
            ref.close()


def _await_all(refs: list[ProcessRef], by: Deadline) -> None:
    poll = select.poll()
    for ref in refs:
        poll.register(ref.fileno(), select.POLLIN)
    alive = len(refs)
    while alive:
        done = poll.poll(by.left_s() * 1000)
        if not done:
            return
        for fd, _ in done:
            poll.unregister(fd)
        alive -= len(done)


def _remove_all(what: list[str]) -> tuple[list[str], list[str]]:
    """Remove what can be; gives what was and, after a bounded wait, what could not be.

    A cgroup stays populated until its zombies are reaped, which their new parent may be late to.
    """
    by = Deadline.after(_REAPED_S)
    removed: list[str] = []
    kept = what
    while True:
        removed += [one for one in kept if _remove(one)]
        kept = [one for one in kept if one not in removed]
        if not kept or by.passed:
            return removed, kept
        time.sleep(_LOOK_EVERY_S)  # cgroup.events could be polled, for one wait that is rare


def _remove(what: str) -> bool:
    kind, _, path = what.partition(" ")
    if kind == "cgroup":
        return remove_tree(path)
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def remove_recorded(record: Record) -> None:
    """Remove what an own run recorded as its own, once all its processes are dead; and the record.

    A guardian that was killed could not: its keeper does.
    """
    if record.present:
        claim = Claim.of(record)
        own, _ = resources_of(claim.run)
        _, kept = _remove_all([one.what for one in own])
        if kept:
            claim.close()
        else:
            claim.forget()


def sweep_own(record: Record, kill_s: float) -> None:
    """End what an own keeper, killed, can no longer end; nothing to do when it left in order."""
    if record.present:
        with contextlib.suppress(Exception):  # the record stays, and the next start looks again
            sweep(Claim.of(record), terminate_s=0.0, kill_s=kill_s)
    record.close()


def sweep_at_start() -> list[Swept]:
    """Before a start: sweep what dead runs left. Costs a directory listing when there are none.

    Says one line for each run of which something was left. Never raises.
    """
    done: list[Swept] = []
    try:
        _, claims = registered(claim_dead=True)
        for claim in claims:
            with contextlib.ExitStack() as owned:
                owned.callback(claim.close)
                swept = sweep(claim, terminate_s=_AT_START_S, kill_s=_AT_START_S)
                done.append(swept)
                if swept.ended or swept.removed or swept.survivors:
                    say(str(swept))
    except Exception as error:  # a start goes on whatever an old run's files hold
        say(f"could not sweep: {error!r}")
    return done
