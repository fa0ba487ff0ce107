"""The life of the engine, as a table; readiness is read from it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stopbath.lifecycle import IllegalTransition

if TYPE_CHECKING:
    from stopbath.engine.replica import ReplicaView

__all__ = ["ENGINE_TRANSITIONS", "EngineEvent", "EngineState", "EngineStatus", "after"]


class EngineState(enum.Enum):
    """Where the engine is in its life; only READY accepts requests."""

    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"  # no replica lives, one is being restarted
    DRAINING = "draining"  # finishes what it accepted, accepts nothing new
    DEAD = "dead"  # no replica is left
    STOPPED = "stopped"  # everything accepted has its answer, and nothing comes after it


class EngineEvent(enum.Enum):
    """What can happen to the engine."""

    READY = "ready"
    DRAIN = "drain"
    DIED = "last replica lost"
    LOST = "last replica lost, to be restarted"
    RESTORED = "replica restored"
    STOP = "stop"


_S, _E = EngineState, EngineEvent

ENGINE_TRANSITIONS: dict[tuple[EngineState, EngineEvent], EngineState] = {
    (_S.STARTING, _E.READY): _S.READY,
    (_S.STARTING, _E.DRAIN): _S.DRAINING,
    (_S.STARTING, _E.DIED): _S.DEAD,
    (_S.STARTING, _E.STOP): _S.STOPPED,
    (_S.READY, _E.DRAIN): _S.DRAINING,
    (_S.READY, _E.DIED): _S.DEAD,
    (_S.READY, _E.STOP): _S.STOPPED,
    (_S.READY, _E.LOST): _S.RECOVERING,
    (_S.READY, _E.RESTORED): _S.READY,
    (_S.RECOVERING, _E.RESTORED): _S.READY,
    (_S.RECOVERING, _E.DIED): _S.DEAD,
    (_S.RECOVERING, _E.DRAIN): _S.DRAINING,
    (_S.RECOVERING, _E.STOP): _S.STOPPED,
    (_S.DRAINING, _E.DRAIN): _S.DRAINING,
    (_S.DRAINING, _E.DIED): _S.DRAINING,  # it leaves anyway; the cause is latched beside it
    (_S.DRAINING, _E.STOP): _S.STOPPED,
    (_S.DEAD, _E.DRAIN): _S.DEAD,  # clients go on hearing the cause, not the stop
    (_S.DEAD, _E.STOP): _S.STOPPED,
    (_S.STOPPED, _E.DRAIN): _S.STOPPED,
    (_S.STOPPED, _E.DIED): _S.STOPPED,
    (_S.STOPPED, _E.STOP): _S.STOPPED,
}


def after(state: EngineState, event: EngineEvent) -> EngineState:
    """Look up the state that follows; `IllegalTransition` says what cannot happen now."""
    try:
        return ENGINE_TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition("engine", state.value, event.value) from None


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The engine as `/v1/status` shows it."""

    state: EngineState
    cause: str | None  # the first fault that is not mended
    waiting: int
    running: int
    replicas: tuple[ReplicaView, ...]
