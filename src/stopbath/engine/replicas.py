"""The replicas of one engine: which of them serve, which are coming back, and the first cause."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from stopbath.engine.replica import Replica, ReplicaEvent, ReplicaState, ReplicaView
from stopbath.errors import WorkerLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stopbath.engine.events import Events
    from stopbath.executor.base import Executor
    from stopbath.lifecycle import Cause

    Lost = Callable[[Replica, Executor, WorkerLost], None]

__all__ = ["Replicas"]


class Replicas:
    """Keeps account; what follows for requests is the engine's. Lives on the engine's loop."""

    def __init__(self, executors: Sequence[Executor], events: Events) -> None:
        replicas = (Replica(executor.status().name, executor) for executor in executors)
        self._replicas = {replica.name: replica for replica in replicas}
        self._events = events
        self._restarts: Callable[[str], bool] = lambda _name: False
        self.cause: str | None = None
        """The first fault that is not mended."""

    def __getitem__(self, name: str) -> Replica:
        return self._replicas[name]

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, in order."""
        return tuple(self._replicas)

    @property
    def hopeful(self) -> bool:
        """Whether a request that waits may find a replica yet."""
        return any(each.state is not ReplicaState.FAILED for each in self._replicas.values())

    def views(self) -> tuple[ReplicaView, ...]:
        """Say how each is."""
        return tuple(replica.view() for replica in self._replicas.values())

    def watch(self, lost: Lost) -> None:
        """Have `lost` called on the running loop when a replica fails; of this incarnation."""
        for replica in self._replicas.values():
            self.watch_one(replica, lost)

    @staticmethod
    def watch_one(replica: Replica, lost: Lost) -> None:
        """Watch the incarnation that a replica has now."""
        loop, executor = asyncio.get_running_loop(), replica.executor

        def failed(cause: Cause) -> None:
            error = executor.lost() or WorkerLost(str(cause))
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(lost, replica, executor, error)

        executor.on_failure(failed)

    def restarts_with(self, begin: Callable[[str], bool]) -> None:
        """Have `begin(name)` called for each lost replica; whether it restarts it."""
        self._restarts = begin

    def lose(self, replica: Replica, lost: WorkerLost, *, may_restart: bool) -> WorkerLost:
        """Note a loss; give the error, which names the replica, for whoever was served by it."""
        named = str(lost).startswith(replica.name)
        error = lost if named else type(lost)(f"{replica.name}: {lost}")
        replica.cause = str(error)
        self.cause = self.cause or replica.cause
        again = may_restart and self._restarts(replica.name)
        replica.apply(ReplicaEvent.RESTART if again else ReplicaEvent.GIVE_UP)
        self._tell(replica, "lost")
        return error

    def replace(self, name: str, executor: Executor) -> None:
        """Note what is being started in place of a lost replica."""
        replica = self._replicas[name]
        replica.executor = executor
        replica.restarts += 1
        self._tell(replica, "starting")

    def restore(self, name: str) -> Replica:
        """Note that a replica serves again."""
        replica = self._replicas[name]
        replica.apply(ReplicaEvent.RESTORED)
        if all(each.state is ReplicaState.SERVING for each in self._replicas.values()):
            self.cause = None
        self._tell(replica, "restored")
        return replica

    def give_up(self, name: str, cause: str) -> bool:
        """Expect a lost replica no longer; whether it had been expected."""
        replica = self._replicas[name]
        if replica.state is not ReplicaState.RESTARTING:
            return False
        replica.cause = cause
        replica.apply(ReplicaEvent.GIVE_UP)
        self._tell(replica, "failed")
        return True

    def cease(self) -> None:
        """Expect no lost replica any longer: the server is stopping."""
        for replica in self._replicas.values():
            self.give_up(replica.name, replica.cause or "")

    def _tell(self, replica: Replica, what: str) -> None:
        self._events.publish(
            "replica",
            replica=replica.name,
            what=what,
            restarts=replica.restarts,
            cause=replica.cause,
        )
