"""Ranks as threads of this process, owned as `WorkerGroup` owns processes as far as that goes.

A thread cannot be killed. What does not come back from a call when it is asked to is named as a
survivor, with its stack, and ends with the process.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, cast

from stopbath.lifecycle import (
    Action,
    Cause,
    Deadline,
    Exit,
    GroupState,
    ShutdownReport,
    StartRefused,
    StartupError,
    Survivor,
    WorkerContext,
    WorkerReport,
    WorkerState,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stopbath.lifecycle import Escalation, WorkerSpec

__all__ = ["ThreadGroup"]

_STDERR: Final = 2
_ALIVE: Final = frozenset({WorkerState.STARTING, WorkerState.READY, WorkerState.STOPPING})


class ThreadWorker:
    """One rank: a thread, and what it said. Has what `WorkerView` shows."""

    exit: Exit | None = None

    def __init__(self, spec: WorkerSpec, rank: int, said: Callable[[], None]) -> None:
        self.spec = spec
        self.name, self.rank, self.pid = str(spec.name), rank, os.getpid()
        self.state = WorkerState.CREATED
        self.phase = "starting"
        self.info: Any = None
        self.error: BaseException | None = None
        self.ended_s: float | None = None
        self.heard_s = time.monotonic()
        self._said = said
        # The same object as a process has; its frames come here instead of a socket.
        self.ctx = WorkerContext(cast("Any", self), self.name, {}, None)
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    @property
    def last_progress_s(self) -> float:
        """Seconds since it last said something of itself."""
        return time.monotonic() - self.heard_s

    def start(self) -> None:
        """Run the target with descriptors of its own: those of the spec are the caller's."""
        self.ctx.fds = {name: os.dup(fd) for name, fd in self.spec.fds.items()}
        self.state = WorkerState.STARTING
        self.thread.start()

    def _run(self) -> None:
        try:
            module, _, name = str(self.spec.target).partition(":")
            getattr(importlib.import_module(module), name)(self.ctx, *self.spec.args)
        except BaseException as error:  # noqa: BLE001  (a rank that ends ends its replica, whatever the reason)
            self.error = error
        for fd in self.ctx.fds.values():
            with suppress(OSError):  # the rank has closed it, as its socket
                os.close(fd)
        self.state, self.ended_s = WorkerState.GONE, time.monotonic()
        self._said()

    # What `WorkerContext` asks of its channel.

    wants_write = False

    def flush(self) -> bool:
        """Nothing is ever kept back."""
        return True

    def send(self, frame: dict[str, Any]) -> None:
        """Take in what the rank says of itself."""
        self.heard_s = time.monotonic()
        if frame["t"] == "ready":
            self.info, self.phase = frame["info"], "working"
            if self.state is WorkerState.STARTING:
                self.state = WorkerState.READY
        elif frame["t"] == "progress":
            self.phase = frame["message"]
        self._said()


class ThreadGroup:
    """The part of `WorkerGroup` that an executor uses, over threads; safe from any thread."""

    def __init__(
        self, name: str, specs: Sequence[WorkerSpec], *, escalation: Escalation, start_s: float
    ) -> None:
        self.name = name
        self.escalation = escalation
        self.cause: Cause | None = None
        self.state = GroupState.NEW
        self._start_s = start_s
        self._changed = threading.Condition()
        self._callbacks: list[Callable[[Cause], None]] = []
        self._hurry = False
        self.workers = tuple(
            ThreadWorker(spec, rank, self._look) for rank, spec in enumerate(specs)
        )

    def start(self) -> None:
        """Start every rank; returns at once."""
        self.state = GroupState.STARTING
        for worker in self.workers:
            worker.start()

    def wait_ready(self, by: Deadline) -> None:
        """Wait until every rank is ready; `StartupError` when one was not."""
        with self._changed:
            while self.state is GroupState.STARTING:
                heard = (w.heard_s for w in self.workers if w.state is WorkerState.STARTING)
                # None that starts: one has ended this moment, and its thread is to say so.
                slowest_s = min(heard, default=time.monotonic())
                limit = by.sooner(Deadline(slowest_s + self._start_s))
                if limit.passed:
                    break
                self._changed.wait(min(limit.left_s(), threading.TIMEOUT_MAX))
        if self.state is GroupState.STARTING:
            late = [w for w in self.workers if w.state is WorkerState.STARTING] or self.workers
            self._fault(late[0], "was not ready in time")
        if self.state is not GroupState.READY:
            nobody = Cause(self.name, None, "starting", "was stopped", None, ())
            raise StartupError(self.cause or nobody, self.shutdown(first=Action.SIGTERM))

    def on_failure(self, callback: Callable[[Cause], None]) -> None:
        """Have `callback` called once with the first fault; a late one is replayed."""
        with self._changed:
            cause = self.cause
            if cause is None:
                self._callbacks.append(callback)
        if cause is not None:
            callback(cause)

    def fail(self, worker: str, what: str) -> None:
        """Declare a rank at fault; the others are asked to end."""
        self._fault(next(each for each in self.workers if each.name == worker), what)

    def signal(self, worker: str, number: int) -> None:
        """Write the stacks of this process, which is what the one signal there is asks for."""
        del worker, number
        faulthandler.dump_traceback(_STDERR, all_threads=True)

    def _look(self) -> None:
        """See what follows from a rank's word or end; on that rank's thread."""
        with self._changed:
            if self.state is GroupState.STARTING and all(
                worker.state is WorkerState.READY for worker in self.workers
            ):
                self.state = GroupState.READY
            self._changed.notify_all()
        for worker in self.workers:
            if worker.state is WorkerState.GONE and not worker.ctx.stopping.is_set():
                self._fault(worker, _said_by(worker.error))

    def _fault(self, worker: ThreadWorker, what: str) -> None:
        with self._changed:
            if self.cause is not None or self.state in {GroupState.STOPPING, GroupState.STOPPED}:
                return
            trace = traceback.format_exception(worker.error) if worker.error else []
            if isinstance(worker.error, StartRefused):
                trace = []
            lines = tuple(line for part in trace for line in part.splitlines())[-64:]
            cause = self.cause = Cause(worker.name, worker.pid, worker.phase, what, None, lines)
            self.state = GroupState.STOPPING
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        self._ask(Action.SIGTERM, 0.0)
        for callback in callbacks:
            callback(cause)

    def _ask(self, first: Action, within_s: float) -> None:
        frame = {"t": "stop", "action": int(first), "within_s": within_s}
        for worker in self.workers:
            if worker.state in _ALIVE:
                worker.state = WorkerState.STOPPING
            worker.ctx.take(frame)

    def shutdown(
        self, deadline: Deadline | None = None, *, first: Action = Action.DRAIN
    ) -> ShutdownReport:
        """Ask every rank to end, wait, and say which did; nothing is done to those that do not."""
        began_s, started_at = time.monotonic(), datetime.now(UTC).isoformat()
        graces = Deadline(began_s + self.escalation.total_s)
        by = graces if deadline is None else graces.sooner(deadline)
        with self._changed:
            if self.state is not GroupState.STOPPED:
                self.state = GroupState.STOPPING
        self._ask(first, by.left_s())
        with self._changed:
            self._changed.wait_for(lambda: self._hurry or not self._living(), by.left_s())
            living = self._living()
            self.state = GroupState.SURVIVED if living else GroupState.STOPPED
        workers = tuple(self._report_of(worker, began_s) for worker in self.workers)
        survivors = tuple(_survivor(worker) for worker in living)
        duration_s = time.monotonic() - began_s
        return ShutdownReport(
            self.name, self.cause, "shutdown()", started_at, duration_s, workers, (), survivors
        )

    def kill(self) -> None:
        """Wait no longer for anybody: that is all that can be done to a thread."""
        self._ask(Action.SIGKILL, 0.0)
        with self._changed:
            self._hurry = True
            self._changed.notify_all()

    def _living(self) -> list[ThreadWorker]:
        return [worker for worker in self.workers if worker.state in _ALIVE]

    def _report_of(self, worker: ThreadWorker, began_s: float) -> WorkerReport:
        ended_s = worker.ended_s
        if ended_s is None and worker.state in _ALIVE:
            return WorkerReport(
                worker.name, worker.rank, worker.pid, "survived", None, (), None, ()
            )
        by_itself = ended_s is None or ended_s < began_s
        at_s = None if ended_s is None else max(0.0, ended_s - began_s)
        return WorkerReport(
            worker.name, worker.rank, worker.pid, "exited" if by_itself else "drained",
            None, (), at_s, (), crashed=worker.error is not None,
        )  # fmt: skip


def _said_by(error: BaseException | None) -> str:
    if isinstance(error, StartRefused):
        return f"refused: {error}"
    return "ended" if error is None else f"raised {type(error).__name__}: {error}"


def _survivor(worker: ThreadWorker) -> Survivor:
    frame = sys._current_frames().get(worker.thread.ident or 0)  # noqa: SLF001  (there is no other way to ask)
    stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
    return Survivor(
        os.getpid(), worker.name, "a thread of this process", "", "asked", {"stack": stack}
    )
