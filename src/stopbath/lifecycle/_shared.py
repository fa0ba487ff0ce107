"""What the groups of one process share: a supervisor's thread and a keeper."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import TYPE_CHECKING

from stopbath.lifecycle._deadline import Deadline
from stopbath.lifecycle._errors import LifecycleError, say
from stopbath.lifecycle._registry import Record
from stopbath.lifecycle._spawn import KeeperClient
from stopbath.lifecycle._supervisor import Supervisor
from stopbath.lifecycle._sweep import sweep_at_start

if TYPE_CHECKING:
    from stopbath.lifecycle._group import WorkerGroup

__all__ = ["SHARED"]


class Shared:
    """The one supervisor of this process, made by its first group and closed by its last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._supervisor: Supervisor | None = None
        self._groups: dict[WorkerGroup, Supervisor] = {}
        self._closing: list[Supervisor] = []
        self._late: list[KeeperClient] = []  # had no time to leave; a child to be reaped

    def acquire(self, group: WorkerGroup) -> Supervisor:
        """Give the supervisor that is to drive `group`, with its keeper."""
        self._reap_the_late()
        with self._lock:
            if self._supervisor is None or self._supervisor.keeper.channel.eof:
                sweep_at_start()
                record = Record.create(os.urandom(8).hex(), "library", group.name, sys.argv)
                self._supervisor = Supervisor(KeeperClient.launch(record))
                self._supervisor.start_thread()
                atexit.register(self.stop_all)
            self._groups[group] = self._supervisor
            return self._supervisor

    def release(self, group: WorkerGroup, supervisor: Supervisor, by: Deadline) -> None:
        """Take a group that is over off the list; the last one closes the supervisor.

        Returns by then, even if the keeper has not left yet: the next call looks after it.
        """
        self._reap_the_late()
        with self._lock:
            if self._groups.pop(group, None) is not None:
                alone = supervisor not in self._groups.values()
                if alone and supervisor is self._supervisor:
                    self._supervisor = None
                    atexit.unregister(self.stop_all)
                if alone:
                    self._closing.append(supervisor)
        while self._closing:
            leaving = self._closing.pop()
            try:
                if not leaving.close(by):
                    with self._lock:
                        self._late.append(leaving.keeper)
            except BaseException:  # a Ctrl-C in the middle: whoever stops next goes on with it
                self._closing.append(leaving)
                raise

    def _reap_the_late(self) -> None:
        with self._lock:
            late, self._late = self._late, []
        late = [keeper for keeper in late if not keeper.close(Deadline.after(0))]
        with self._lock:
            self._late += late

    def stop_all(self) -> None:
        """At interpreter exit; the keeper is the guarantee, this is the courtesy."""
        groups = list(self._groups)
        for group in groups:  # all at once, so that the graces do not add up
            group.begin_shutdown()
        for group in groups:
            try:
                group.shutdown()
            except LifecycleError as error:
                say(str(error))

    def forget(self) -> None:
        """In a forked child, which owns nothing: the parent's groups go on."""
        supervisor, self._supervisor = self._supervisor, None
        late = self._late
        self._groups, self._closing, self._late = {}, [], []
        self._lock = threading.Lock()  # the old one may be held by a thread that is not here
        if supervisor is not None:
            supervisor.abandon()
        for keeper in late:
            keeper.abandon()


SHARED = Shared()
os.register_at_fork(after_in_child=SHARED.forget)
