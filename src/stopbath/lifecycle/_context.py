"""The worker's side: what the function that runs in a worker is given."""

from __future__ import annotations

import math
import os
import select
import threading
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

from stopbath.lifecycle._errors import LifecycleError, StartRefused
from stopbath.lifecycle._escalation import Action
from stopbath.lifecycle._process import die_with_group

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stopbath.lifecycle._channel import Channel, Frame
    from stopbath.lifecycle._supervisor import Supervisor

__all__ = ["StopNotice", "WorkerContext"]

_SEND_WAIT_S = 5.0


class StopNotice(NamedTuple):
    """A stage of a stop: how hard, and after how many seconds a harsher one follows."""

    action: Action
    within_s: float


class WorkerContext:
    """How a worker talks with the supervisor that owns it. Methods are safe from any thread.

    `stopping` is set when the worker is asked to end; the function then returns. When the
    supervisor is gone the worker is killed: by the keeper, and by this object's thread when the
    control socket ends, whichever comes first.
    """

    def __init__(
        self, channel: Channel, name: str, fds: Mapping[str, int], keeper: Frame | None
    ) -> None:
        self.name = name
        self.fds = dict(fds)
        self.stopping = threading.Event()
        self.is_ready = False
        self._keeper = keeper
        self._channel = channel
        self._lock = threading.Lock()
        self._notices: list[StopNotice] = []
        self._callbacks: list[Callable[[StopNotice], None]] = []

    def ready(self, info: Any = None) -> None:
        """Report that the worker can do its work; `info` is any JSON value.

        `LifecycleError` on the second call: a worker becomes ready once.
        """
        with self._lock:
            if self.is_ready:
                raise LifecycleError(f"worker {self.name} has said ready already")
            self.is_ready = True
        self._send({"t": "ready", "info": info})

    def progress(self, message: str) -> None:
        """Say what is being done; extends the start budget, up to its hard cap.

        Never waits: when the supervisor does not read, the message is dropped.
        """
        self._send({"t": "progress", "message": str(message)[:500]}, wait=False)

    def wait_stop(self, timeout_s: float | None = None) -> bool:
        """Wait until the worker is asked to end; whether it was within `timeout_s` seconds."""
        return self.stopping.wait(timeout_s)

    def on_stop(self, callback: Callable[[StopNotice], None]) -> None:
        """Have `callback` called for every stage of a stop, past ones too.

        It runs on the thread that reads the control socket: it must be short.
        """
        with self._lock:
            self._callbacks.append(callback)
            past = list(self._notices)
        for notice in past:
            callback(notice)

    def announce_stop_within(self, seconds: float) -> None:
        """Say how long this worker's own orderly stop can take; the drain waits that long."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"a stop takes a number of seconds >= 0, not {seconds!r}")
        self._send({"t": "budget", "stop_s": seconds})

    def send_report(self, report: Frame) -> None:
        """Hand a JSON object on to whoever supervises this worker."""
        self._send({"t": "report", "report": report})

    @property
    def keeper_pid(self) -> int:
        """The pid of this worker's parent, the keeper."""
        return os.getppid()

    @property
    def guardian_pid(self) -> int | None:
        """The pid of the process that supervises this worker, as it gave it."""
        return None if self._keeper is None else int(self._keeper["client_pid"])

    def supervisor(self) -> Supervisor:
        """Give a supervisor whose workers are started by the keeper that started this one.

        `LifecycleError` unless the worker was given `keeper_access`; the caller owns it.
        """
        if self._keeper is None:
            raise LifecycleError(f"worker {self.name} was not given access to the keeper")
        from stopbath.lifecycle._spawn import KeeperClient
        from stopbath.lifecycle._supervisor import Supervisor

        return Supervisor(KeeperClient.inherited(int(self._keeper["fd"])))

    def listen(self) -> None:
        """Read the control socket until it ends, then die. The worker's one extra thread."""
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        while True:
            poll.poll()
            for frame, _ in self._channel.receive():
                self.take(frame)
            if self._channel.eof:
                die_with_group()

    def take(self, frame: Frame) -> None:
        """Act on a frame from the supervisor."""
        if frame["t"] == "stop":
            self._stop(StopNotice(Action(frame["action"]), float(frame["within_s"])))

    def refused(self, refusal: StartRefused) -> None:
        """Report that the function cannot do what it was asked; used by `_handshake` alone."""
        self._send({"t": "failed", "what": f"refused: {refusal}", "phase": "starting"})

    def failed(self, error: BaseException, phase: str) -> None:
        """Report that the function raised; used by `_child` alone."""
        text = "".join(traceback.format_exception(error))
        what = f"raised {type(error).__name__}: {error}"[:2000]
        self._send({"t": "failed", "what": what, "phase": phase, "traceback": text[-20000:]})

    def _stop(self, notice: StopNotice) -> None:
        with self._lock:
            self._notices.append(notice)
            callbacks = list(self._callbacks)
        self.stopping.set()
        for callback in callbacks:
            try:
                callback(notice)
            except Exception:  # the next callback, and the socket, still count
                traceback.print_exc()

    def _send(self, frame: Frame, *, wait: bool = True) -> None:
        with self._lock:
            try:
                if not wait and not self._channel.flush():
                    return
                self._channel.send(frame)
                while wait and self._channel.wants_write:
                    poll = select.poll()
                    poll.register(self._channel.fileno(), select.POLLOUT)
                    if not poll.poll(_SEND_WAIT_S * 1000):
                        return  # stays queued; the next frame takes it along
                    self._channel.flush()
            except BrokenPipeError:
                return  # the supervisor is gone; the reading thread ends this process
