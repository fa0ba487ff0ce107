"""Worker groups that always stop: spawn, ready, watch, stop, report. Standard library only.

Names are loaded on first use, so that the keeper and the guardian, which live in this package
too, stay as small as a bare interpreter.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stopbath.lifecycle._adopt import Existing, adopt
    from stopbath.lifecycle._context import StopNotice, WorkerContext
    from stopbath.lifecycle._deadline import Deadline
    from stopbath.lifecycle._errors import (
        Cause,
        Exit,
        IllegalTransition,
        KeeperDied,
        LifecycleError,
        NotStarted,
        ProtocolError,
        StartRefused,
        StartupError,
        WorkerDied,
    )
    from stopbath.lifecycle._escalation import Action, Escalation, Step
    from stopbath.lifecycle._group import Policy, WorkerGroup
    from stopbath.lifecycle._process import ProcessRef
    from stopbath.lifecycle._report import ShutdownReport, Survivor, WorkerReport
    from stopbath.lifecycle._spec import WorkerSpec
    from stopbath.lifecycle._state import GroupState, WorkerState
    from stopbath.lifecycle._supervisor import Supervisor
    from stopbath.lifecycle._view import WorkerView

_HOMES = {
    "_adopt": ("Existing", "adopt"),
    "_context": ("StopNotice", "WorkerContext"),
    "_deadline": ("Deadline",),
    "_errors": (
        "Cause",
        "Exit",
        "IllegalTransition",
        "KeeperDied",
        "LifecycleError",
        "NotStarted",
        "ProtocolError",
        "StartRefused",
        "StartupError",
        "WorkerDied",
    ),
    "_escalation": ("Action", "Escalation", "Step"),
    "_group": ("Policy", "WorkerGroup"),
    "_process": ("ProcessRef",),
    "_report": ("ShutdownReport", "Survivor", "WorkerReport"),
    "_spec": ("WorkerSpec",),
    "_state": ("GroupState", "WorkerState"),
    "_supervisor": ("Supervisor",),
    "_view": ("WorkerView",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Action",
    "Cause",
    "Deadline",
    "Escalation",
    "Existing",
    "Exit",
    "GroupState",
    "IllegalTransition",
    "KeeperDied",
    "LifecycleError",
    "NotStarted",
    "Policy",
    "ProcessRef",
    "ProtocolError",
    "ShutdownReport",
    "StartRefused",
    "StartupError",
    "Step",
    "StopNotice",
    "Supervisor",
    "Survivor",
    "WorkerContext",
    "WorkerDied",
    "WorkerGroup",
    "WorkerReport",
    "WorkerSpec",
    "WorkerState",
    "WorkerView",
    "adopt",
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOME_OF[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
