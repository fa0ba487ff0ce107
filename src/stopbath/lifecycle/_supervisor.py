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
import selectors
import time
from typing import TYPE_CHECKING

from stopbath.lifecycle._errors import ProtocolError
from stopbath.lifecycle._loop import Loop
from stopbath.lifecycle._spawn import (
    Gone,
    KeeperClient,
    Note,
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


class Supervisor(Loop):
    """The loop that drives groups."""

    def __init__(self, keeper: KeeperClient) -> None:
        super().__init__()
        self.keeper = keeper
        self.on_foreign: Callable[[Event], None] | None = None
        self._groups: list[GroupCore] = []
        self._by_spawn: dict[int, tuple[GroupCore, Member]] = {}
        self._keeper_events = selectors.EVENT_READ
        self._selector.register(keeper.channel, self._keeper_events, self._hear_keeper)

    def close(self, by: Deadline | None = None) -> bool:
        """Leave: the loop ends, the keeper is let go, threads and descriptors are given back.

        Whether the keeper has left `by` then; if not, `keeper.close()` is to be called again.
        """
        self._end_threads(by)
        gone = self.keeper.close(by)
        self._close_fds()
        return gone

    def abandon(self) -> None:
        """In a forked child: close the copies of the parent's descriptors, and own nothing."""
        self.keeper.abandon()
        for _, member in self._by_spawn.values():
            member.close()
        self._close_fds()

    def _due(self, now: float) -> float:
        return min((self._isolated(group.tick, now) for group in self._groups), default=math.inf)

    def _before_waiting(self) -> None:
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
        if isinstance(event, Note):
            if event.mine:
                forward(f"stopbath: {event.what}\n".encode())
            return
        if isinstance(event, StraysLeft | Gone) and not event.mine:  # of a worker of our worker
            for group in self._groups:
                group.strays_left(-event.id, event.left if isinstance(event, StraysLeft) else [])
        if not event.mine or event.id not in self._by_spawn:
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
