"""A replica as the engine sees it: which executor serves it now, and what became of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stopbath.lifecycle import GroupState, IllegalTransition

if TYPE_CHECKING:
    from stopbath.executor.base import Executor, ReplicaStatus

__all__ = ["REPLICA_TRANSITIONS", "Replica", "ReplicaEvent", "ReplicaState", "ReplicaView"]


_ENDING = frozenset({GroupState.STOPPING, GroupState.STOPPED, GroupState.SURVIVED})


class ReplicaState(enum.Enum):
    """What the engine may expect of a replica."""

    SERVING = "serving"
    RESTARTING = "restarting"
    FAILED = "failed"  # lost for good


class ReplicaEvent(enum.Enum):
    """What can happen to a replica."""

    RESTART = "lost, to be restarted"
    RESTORED = "restored"
    GIVE_UP = "lost for good"


_S, _E = ReplicaState, ReplicaEvent

REPLICA_TRANSITIONS: dict[tuple[ReplicaState, ReplicaEvent], ReplicaState] = {
    (_S.SERVING, _E.RESTART): _S.RESTARTING,
    (_S.SERVING, _E.GIVE_UP): _S.FAILED,
    (_S.RESTARTING, _E.RESTORED): _S.SERVING,
    (_S.RESTARTING, _E.GIVE_UP): _S.FAILED,
}


@dataclass(slots=True, eq=False)
class Replica:
    """One replica through all its incarnations."""

    name: str
    executor: Executor  # of the incarnation that serves, or is being started
    state: ReplicaState = ReplicaState.SERVING
    restarts: int = 0
    cause: str | None = None  # of its last loss

    def apply(self, event: ReplicaEvent) -> None:
        """Move along the table."""
        try:
            self.state = REPLICA_TRANSITIONS[self.state, event]
        except KeyError:
            raise IllegalTransition(self.name, self.state.value, event.value) from None

    def view(self) -> ReplicaView:
        """Say how it is; reads state, asks nobody."""
        now = self.executor.status()
        lost = self.state is not ReplicaState.SERVING
        hidden = self.state is ReplicaState.RESTARTING or (lost and now.state not in _ENDING)
        state = self.state.value if hidden else now.state.value
        cause = self.cause or (None if now.cause is None else str(now.cause))
        return ReplicaView(self.name, state, self.restarts, cause, now)


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica as `/v1/status` shows it: its group's state, unless that says too much."""

    name: str
    state: str
    restarts: int
    cause: str | None
    now: ReplicaStatus
