"""The fault matrix, F01 to F38, on every face it applies to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stopbath.drill.catalog import (
    behind,
    cleanup,
    descendants,
    devices,
    hidden,
    holdings,
    machine,
    noticed,
    resources,
    starting,
    stopping,
    surroundings,
)
from stopbath.drill.starts import scenario_of

if TYPE_CHECKING:
    from stopbath.drill.scenario import Absent, Scenario

__all__ = ["ABSENT", "KINDS", "SCENARIOS", "find"]

_PARTS = (
    *(behind, descendants, resources, devices, holdings, noticed, hidden),
    *(stopping, cleanup, starting, surroundings, machine),
)

SCENARIOS: tuple[Scenario, ...] = tuple(it for part in _PARTS for it in part.SCENARIOS)
ABSENT: tuple[Absent, ...] = tuple(it for part in _PARTS for it in part.ABSENT)
KINDS: tuple[str, ...] = tuple(f"F{number:02d}" for number in range(1, 39))


def find(ident: str) -> Scenario:
    """Give the scenario called `ident`; `LookupError` when there is none."""
    for scenario in SCENARIOS:
        if scenario.id == ident:
            return scenario
    return scenario_of(ident)
