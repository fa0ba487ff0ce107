"""The supervisor: one loop, one selector, everything of every group.

It waits on pidfds, control sockets, stderr pipes, the keeper's socket, a wake-up pipe and the
next deadline of any group, and wakes up for nothing else. It decides and signals; it neither
spawns nor reaps, which is the keeper's. It runs on a daemon thread of the program, or on the
main thread of the guardian.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import selectors
import signal
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from stopbath.lifecycle._errors import ProtocolError
from stopbath.lifecycle._spawn import (
    Gone,
    KeeperClient,
    Spawned,
    SpawnFailed,
    Stopped,
    StraysLeft,
    WorkerExited,
)
from stopbath.lifecycle._words import forward

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopbath.lifecycle._core import GroupCore
    from stopbath.lifecycle._deadline import Deadline
    from stopbath.lifecycle._member import Member
    from stopbath.lifecycle._spawn import Event

__all__ = ["Supervisor"]

_JOIN_S = 2.0
_CALLBACK_S = 0.05  # a callback that goes on is not waited for: its thread is a daemon
_LONGEST_S = 3600.0  # epoll takes milliseconds in 31 bits


class Supervisor:
    """Drives groups. `start_thread` for a program; `run` for a process that does nothing else."""

    def __init__(self, keeper: KeeperClient) -> None:
        self.keeper = keeper
        self.owner_pid = os.getpid()
        self.on_foreign: Callable[[Event], None] | None = None
        self._selector = selectors.DefaultSelector()
        self._commands: deque[Callable[[], None]] = deque()
        self._groups: list[GroupCore] = []
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._by_spawn: dict[int, tuple[GroupCore, Member]] = {}
        # Sockets, not a pipe: a post that races with close fails, and never hits a reused number.
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._leaving = self._left = False
        self._thread: threading.Thread | None = None
        self._dispatcher: threading.Thread | None = None
        self._calls: queue.SimpleQueue[tuple[Callable[..., None], Any] | None] = queue.SimpleQueue()
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._woken)
        self._keeper_events = selectors.EVENT_READ
        self._selector.register(keeper.channel, self._keeper_events, self._hear_keeper)

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

    def close(self, by: Deadline | None = None) -> bool:
        """Leave: the loop ends, the keeper is let go, threads and descriptors are given back.

        Whether the keeper has left `by` then; if not, `keeper.close()` is to be called again.
        """
        self.post(self.leave)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        if self._dispatcher is not None:
            self._calls.put(None)
            if self._dispatcher is not threading.current_thread():
                left_s = _CALLBACK_S if by is None else by.left_s()
                self._dispatcher.join(min(_CALLBACK_S, left_s))
        gone = self.keeper.close(by)
        self._close_fds()
        return gone

    def abandon(self) -> None:
        """In a forked child: close the copies of the parent's descriptors, and own nothing."""
        self.keeper.abandon()
        for _, member in self._by_spawn.values():
            member.close()
        self._close_fds()

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
            due = min((self._isolated(group.tick, now) for group in self._groups), default=math.inf)
            due = min(due, self._ring(now))
            if self._leaving:  # asked to, or because a tick ended the last group
                return
            self._watch_keeper()
            left = max(0.0, due - time.monotonic())
            timeout = None if left == math.inf else min(left, _LONGEST_S)
            for key, _ in self._selector.select(timeout):
                if self._selector.get_map().get(key.fd) is key:  # not taken out by an earlier event
                    self._isolated(key.data)

    def _watch_keeper(self) -> None:
        """Be woken when the keeper's socket takes more, for as long as there is more for it.

        The spawns of a big group, each with its environment, are more than a socket holds.
        """
        channel = self.keeper.channel
        events = selectors.EVENT_READ
        if channel.wants_write:
            events |= selectors.EVENT_WRITE
        if events != self._keeper_events and not channel.eof:
            self._keeper_events = events
            self._selector.modify(channel, events, self._hear_keeper)

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

    # -- groups (loop's thread)

    def add(self, group: GroupCore) -> None:
        """Take a group in and start it."""
        self._groups.append(group)
        group.start(self)

    def drop(self, group: GroupCore) -> None:
        """Forget a group that is over."""
        if group in self._groups:
            self._groups.remove(group)
        for ident in [i for i, (owner, _) in self._by_spawn.items() if owner is group]:
            del self._by_spawn[ident]

    def watch_words(self, group: GroupCore, member: Member) -> None:
        """Listen to a worker's control socket and stderr from now on."""
        if member.kept:
            self._by_spawn[member.spawn_id] = (group, member)
        if member.channel is not None:
            self._selector.register(
                member.channel, selectors.EVENT_READ, lambda: self._hear(group, member)
            )
        if member.words.fd >= 0:
            self._selector.register(
                member.words.fd, selectors.EVENT_READ, lambda: self._read_words(member)
            )

    def watch_death(self, group: GroupCore, member: Member) -> None:
        """Watch a worker's pidfd from now on."""
        assert member.ref is not None
        self._selector.register(
            member.ref, selectors.EVENT_READ, lambda: group.died(member, time.monotonic())
        )

    def unwatch_death(self, member: Member) -> None:
        """The pidfd has said what it has to say."""
        self._unregister(member.ref)

    def unwatch_words(self, member: Member) -> None:
        """Take the last words, then stop listening."""
        if member.words.fd >= 0:
            self._read_words(member)
        self._unregister(member.channel)
        if member.words.fd >= 0:
            self._unregister(member.words.fd)

    def unwatch(self, member: Member) -> None:
        """Stop watching anything of a worker."""
        self.unwatch_words(member)
        self.unwatch_death(member)

    def _unregister(self, fileobj: Any) -> None:
        if fileobj is None:
            return
        try:
            self._selector.unregister(fileobj)
        except (KeyError, ValueError):
            return  # was never watched, or is already taken out

    def hear_out(self, group: GroupCore, member: Member) -> None:
        """Take everything a dead worker had still said, stderr first."""
        if member.words.fd >= 0:
            self._read_words(member)
        if member.channel is not None and not member.channel.eof:
            self._hear(group, member)

    def _read_words(self, member: Member) -> None:
        fd = member.words.fd
        forward(member.words.read())
        if member.words.fd < 0:
            self._unregister(fd)

    def _hear(self, group: GroupCore, member: Member) -> None:
        assert member.channel is not None
        try:
            frames = member.channel.receive()
        except ProtocolError as error:
            self._unregister(member.channel)
            member.channel.close()
            group.fault(member, f"broke the protocol: {error}")
            return
        if member.channel.eof:
            self._unregister(member.channel)  # its pidfd tells the rest
        for frame, fds in frames:
            for fd in fds:
                os.close(fd)
            self._isolated(group.frame, member, frame)

    def _hear_keeper(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # its end is an event of its own
            self.keeper.channel.flush()
        try:
            events = self.keeper.events()
        except ProtocolError as error:
            forward(f"stopbath: the keeper broke the protocol: {error}\n".encode())
            self.keeper.channel.eof = True
            events = []
        for event in events:
            self._isolated(self._from_keeper, event)
        if self.keeper.channel.eof:
            self._unregister(self.keeper.channel)
            for group in list(self._groups):
                self._isolated(group.keeper_died)
            if self.keeper.record is not None:  # now: who is killed next cannot do it any more
                self.call_later(lambda keeper: keeper.end_left(), self.keeper)

    def _from_keeper(self, event: Event) -> None:
        if isinstance(event, StraysLeft) and not event.mine:  # of a worker of our worker
            for group in self._groups:
                group.strays_left(0, event.left)
            return
        mine = isinstance(event, SpawnFailed) or event.mine
        if not mine or event.id not in self._by_spawn:
            if self.on_foreign is not None:
                self.on_foreign(event)
            if isinstance(event, Spawned):
                event.ref.close()
            return
        self._of_a_member(event, *self._by_spawn[event.id])

    @staticmethod
    def _of_a_member(event: Event, group: GroupCore, member: Member) -> None:
        if isinstance(event, Spawned):
            group.spawned(member, event.ref)
        elif isinstance(event, SpawnFailed):
            group.spawn_failed(member, event.errno, event.why)
        elif isinstance(event, Stopped):
            member.stopped()
        elif isinstance(event, WorkerExited):
            group.status(member, event.exit, time.monotonic())
        elif isinstance(event, StraysLeft):
            group.strays_left(member.spawn_id, event.left)
        elif isinstance(event, Gone):
            group.gone(member, event.strays)


def _traceback() -> str:
    import traceback  # 3 ms and 0.5 MB that a guardian as a rule has no use for

    return traceback.format_exc()


def _call(callback: Callable[[Any], None], value: Any) -> None:
    try:
        callback(value)
    except BaseException:  # sys.exit() included: the user's to see, and nobody's to die of
        forward(_traceback().encode())
