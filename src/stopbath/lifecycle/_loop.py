"""A loop: descriptors, commands of other threads, deadlines. It wakes up for nothing else."""

from __future__ import annotations

import contextlib
import math
import queue
import selectors
import signal
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from stopbath.lifecycle._words import forward

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopbath.lifecycle._deadline import Deadline

__all__ = ["Loop"]

_JOIN_S = 2.0
_CALLBACK_S = 0.05  # a callback that goes on is not waited for: its thread is a daemon
_LONGEST_S = 3600.0  # epoll takes milliseconds in 31 bits


class Loop:
    """One selector. `start_thread` for a program; `run` for a process that does nothing else."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._commands: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        # Sockets, not a pipe: a post that races with close fails, and never hits a reused number.
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._leaving = self._left = False
        self._thread: threading.Thread | None = None
        self._dispatcher: threading.Thread | None = None
        self._calls: queue.SimpleQueue[tuple[Callable[..., None], Any] | None] = queue.SimpleQueue()
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._woken)

    # -- any thread

    def start_thread(self) -> None:
        """Run the loop on a daemon thread that no signal interrupts."""
        self._thread = threading.Thread(
            target=self._run_deaf, name="stopbath-supervisor", daemon=True
        )
        self._thread.start()

    def post(self, command: Callable[[], None]) -> None:
        """Have `command` run on the loop's thread, in order. Takes no lock, never waits.

        Once the loop has ended, everything it drove is over: the command runs here.
        """
        self._commands.append(command)
        with contextlib.suppress(OSError):  # it is awake already, or has left
            self._wake_out.send(b"!")
        if self._left:
            self._obey()

    def _end_threads(self, by: Deadline | None) -> None:
        """End the loop and the callbacks' thread, which is not waited for beyond `by`."""
        self.post(self.leave)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        if self._dispatcher is not None:
            self._calls.put(None)
            if self._dispatcher is not threading.current_thread():
                left_s = _CALLBACK_S if by is None else by.left_s()
                self._dispatcher.join(min(_CALLBACK_S, left_s))

    def _close_fds(self) -> None:
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    # -- the loop

    def _run_deaf(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.run()

    def run(self) -> None:
        """Drive every group until `close` is called."""
        try:
            self._loop()
        finally:
            self._left = True
            self._obey()

    def _loop(self) -> None:
        while True:
            now = time.monotonic()
            due = min(self._due(now), self._ring(now))
            if self._leaving:  # asked to, or because what was due has ended the last group
                return
            self._before_waiting()
            left = max(0.0, due - time.monotonic())
            timeout = None if left == math.inf else min(left, _LONGEST_S)
            for key, _ in self._selector.select(timeout):
                if self._selector.get_map().get(key.fd) is key:  # not taken out by an earlier event
                    self._isolated(key.data)

    def _due(self, now: float) -> float:
        """Do what is due by `now`; give the moment at which something is due next."""
        raise NotImplementedError

    def _before_waiting(self) -> None:
        """Say what else is to be waited for."""
        raise NotImplementedError

    def _ring(self, now: float) -> float:
        """Do what was asked for by now; give when the next is due."""
        ripe = [action for when, action in self._timers if when <= now]
        self._timers = [timer for timer in self._timers if timer[0] > now]
        for action in ripe:
            self._isolated(action)
        return min((when for when, _ in self._timers), default=math.inf)

    def _isolated(self, action: Callable[..., float | None], *args: Any) -> float:
        """Do one thing; an error in it is said and stops nothing else."""
        try:
            due = action(*args)
        except Exception:
            forward(_traceback().encode())
            return time.monotonic() + 1.0  # look again, without spinning
        return math.inf if due is None else due

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)
        self._obey()

    def _obey(self) -> None:
        while True:
            try:
                command = self._commands.popleft()
            except IndexError:
                return
            self._isolated(command)

    def leave(self) -> None:
        """End the loop; called on its own thread."""
        self._leaving = True

    def watch_fd(self, fd: int, action: Callable[[], None]) -> None:
        """Call `action` whenever `fd` is readable; for the process whose main thread this is."""
        self._selector.register(fd, selectors.EVENT_READ, action)

    def watch_writable(self, fd: int, action: Callable[[], None]) -> None:
        """Call `action` whenever `fd` takes something; once more for the same is harmless."""
        if fd not in self._selector.get_map():
            self._selector.register(fd, selectors.EVENT_WRITE, action)

    def unwatch_fd(self, fd: int) -> None:
        """Stop watching a descriptor."""
        self._unregister(fd)

    def call_at(self, when: float, action: Callable[[], None]) -> None:
        """Call `action` on the loop's thread at `when` (monotonic seconds); from that thread."""
        self._timers.append((when, action))

    def call_later(self, callback: Callable[[Any], None], value: Any) -> None:
        """Run a user's callback on the dispatcher thread, where it may call `shutdown()`."""
        if self._left:
            call = (callback, value)
            threading.Thread(target=_call, args=call, name="stopbath-callback", daemon=True).start()
            return
        if self._dispatcher is None:
            self._dispatcher = threading.Thread(
                target=self._dispatch, name="stopbath-callbacks", daemon=True
            )
            self._dispatcher.start()
        self._calls.put((callback, value))

    def _dispatch(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while (call := self._calls.get()) is not None:
            _call(*call)

    def _unregister(self, fileobj: Any) -> None:
        if fileobj is None:
            return
        try:
            self._selector.unregister(fileobj)
        except (KeyError, ValueError):
            return  # was never watched, or is already taken out


def _traceback() -> str:
    import traceback  # 3 ms and 0.5 MB that a guardian as a rule has no use for

    return traceback.format_exc()


def _call(callback: Callable[[Any], None], value: Any) -> None:
    try:
        callback(value)
    except BaseException:  # sys.exit() included: the user's to see, and nobody's to die of
        forward(_traceback().encode())
