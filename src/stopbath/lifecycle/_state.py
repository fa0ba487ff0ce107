"""The life of a worker and of a group, as tables.

No I/O and no clock here. A missing row is a bug of whoever sent the event, and says so.
"""

from __future__ import annotations

import enum
from typing import TypeVar

from stopbath.lifecycle._errors import IllegalTransition

__all__ = [
    "GROUP_TRANSITIONS",
    "TRANSITIONS",
    "GroupEvent",
    "GroupState",
    "WorkerEvent",
    "WorkerState",
    "next_state",
]


class WorkerState(enum.Enum):
    """Where a worker is in its life."""

    CREATED = "created"  # described, not yet asked for
    SPAWNING = "spawning"  # asked of the keeper, no pid yet
    STARTING = "starting"  # has a pid and a pidfd; importing, loading
    READY = "ready"  # said so itself
    STOPPING = "stopping"  # asked, or signalled, to end
    EXITED = "exited"  # dead; its strays may still be ending
    GONE = "gone"  # dead, reaped, and nothing it started is left
    SURVIVED = "survived"  # alive after the last step of a stop; still owned and watched


class WorkerEvent(enum.Enum):
    """What can happen to a worker."""

    SPAWN = "spawn"
    SPAWNED = "spawned"
    SPAWN_FAILED = "spawn failed"
    PROGRESS = "progress"
    READY = "ready"
    STOP = "stop"
    EXITED = "exited"
    GONE = "gone"
    OUTLIVED = "outlived the last step"


class GroupState(enum.Enum):
    """Where a group is in its life."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    SURVIVED = "survived"  # the stop is over and something is still alive


class GroupEvent(enum.Enum):
    """What can happen to a group."""

    START = "start"
    ALL_READY = "all ready"
    STOP = "stop"
    ENDED = "ended"
    OUTLIVED = "outlived"


_W, _E = WorkerState, WorkerEvent

TRANSITIONS: dict[tuple[WorkerState, WorkerEvent], WorkerState] = {
    (_W.CREATED, _E.SPAWN): _W.SPAWNING,
    (_W.CREATED, _E.STOP): _W.GONE,
    (_W.SPAWNING, _E.SPAWNED): _W.STARTING,
    (_W.SPAWNING, _E.SPAWN_FAILED): _W.GONE,
    (_W.SPAWNING, _E.STOP): _W.SPAWNING,  # the pid is on its way; stopped as soon as it is known
    (_W.STARTING, _E.PROGRESS): _W.STARTING,
    (_W.STARTING, _E.READY): _W.READY,
    (_W.STARTING, _E.STOP): _W.STOPPING,
    (_W.STARTING, _E.EXITED): _W.EXITED,
    (_W.READY, _E.PROGRESS): _W.READY,
    (_W.READY, _E.STOP): _W.STOPPING,
    (_W.READY, _E.EXITED): _W.EXITED,
    (_W.STOPPING, _E.SPAWNED): _W.STOPPING,  # a survivor without a pid, taken up again
    (_W.STOPPING, _E.SPAWN_FAILED): _W.GONE,
    (_W.STOPPING, _E.PROGRESS): _W.STOPPING,
    (_W.STOPPING, _E.READY): _W.STOPPING,  # it was already on the wire
    (_W.STOPPING, _E.STOP): _W.STOPPING,
    (_W.STOPPING, _E.EXITED): _W.EXITED,
    (_W.STOPPING, _E.OUTLIVED): _W.SURVIVED,
    (_W.SPAWNING, _E.OUTLIVED): _W.SURVIVED,
    (_W.EXITED, _E.STOP): _W.EXITED,
    (_W.EXITED, _E.GONE): _W.GONE,
    (_W.EXITED, _E.OUTLIVED): _W.GONE,  # it is dead itself; its strays are named in the report
    (_W.GONE, _E.STOP): _W.GONE,
    (_W.GONE, _E.GONE): _W.GONE,  # the keeper's late word
    (_W.SURVIVED, _E.STOP): _W.STOPPING,
    (_W.SURVIVED, _E.SPAWNED): _W.SURVIVED,
    (_W.SURVIVED, _E.SPAWN_FAILED): _W.GONE,
    (_W.SURVIVED, _E.PROGRESS): _W.SURVIVED,
    (_W.SURVIVED, _E.READY): _W.SURVIVED,
    (_W.SURVIVED, _E.EXITED): _W.EXITED,
}

_G, _H = GroupState, GroupEvent

GROUP_TRANSITIONS: dict[tuple[GroupState, GroupEvent], GroupState] = {
    (_G.NEW, _H.START): _G.STARTING,
    (_G.NEW, _H.STOP): _G.STOPPED,
    (_G.STARTING, _H.ALL_READY): _G.READY,
    (_G.STARTING, _H.STOP): _G.STOPPING,
    (_G.READY, _H.STOP): _G.STOPPING,
    (_G.STOPPING, _H.STOP): _G.STOPPING,
    (_G.STOPPING, _H.ENDED): _G.STOPPED,
    (_G.STOPPING, _H.OUTLIVED): _G.SURVIVED,
    (_G.STOPPED, _H.STOP): _G.STOPPED,
    (_G.SURVIVED, _H.STOP): _G.STOPPING,
    (_G.SURVIVED, _H.ENDED): _G.STOPPED,  # the last survivor died while watched
}

S = TypeVar("S", WorkerState, GroupState)
E = TypeVar("E", WorkerEvent, GroupEvent)


def next_state(table: dict[tuple[S, E], S], who: str, state: S, event: E) -> S:
    """Look up the state that follows; `IllegalTransition` names who, where and what."""
    try:
        return table[state, event]
    except KeyError:
        raise IllegalTransition(who, state.value, event.value) from None
