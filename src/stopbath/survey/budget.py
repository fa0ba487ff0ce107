"""How the time of a stop is divided, and whether it fits into what others allow for it."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["LIMITS", "Budget", "Phase", "divide"]

LIMITS = (("docker stop", 10.0), ("Kubernetes", 30.0))
"""Who kills everything how many seconds after its SIGTERM, by default."""

_OUTER_S = 1.0  # what the guardian waits beyond the stop it leads, and needs for the report


class Phase(NamedTuple):
    """One part of a stop, in seconds after the first signal."""

    name: str
    what: str
    from_s: float
    to_s: float


class Budget(NamedTuple):
    """A stop against one limit. `cut` names the phase in which the limit falls, if one."""

    who: str
    limit_s: float
    worst_s: float
    cut: str
    remedy: str


def divide(
    drain_s: float,
    terminate_s: float,
    kill_s: float,
    limits: tuple[tuple[str, float], ...] = LIMITS,
) -> tuple[list[Phase], list[Budget]]:
    """Divide the time of a stop in which nothing ends before it has to: the worst case."""
    phases, at = [], 0.0
    for name, what, length in (
        ("drain", "finish what was accepted, accept nothing new", drain_s),
        ("SIGTERM", "asked to leave", terminate_s),
        ("SIGKILL", "made to leave; survivors are named after it", kill_s),
        ("report", "guardian's own second, report and exit code", _OUTER_S),
    ):
        phases.append(Phase(name, what, at, at + length))
        at += length
    return phases, [_against(who, limit, phases) for who, limit in limits]


def _against(who: str, limit_s: float, phases: list[Phase]) -> Budget:
    worst = phases[-1].to_s
    if worst <= limit_s:
        return Budget(who, limit_s, worst, "", "")
    cut = next(phase.name for phase in phases if phase.to_s > limit_s)
    room = limit_s - (worst - phases[0].to_s)
    shorter = f"--drain {room:g}, or " if room > 0 else ""
    option = {
        "docker stop": "docker stop --timeout",
        "Kubernetes": "terminationGracePeriodSeconds:",
    }
    return Budget(who, limit_s, worst, cut, f"{shorter}{option.get(who, 'a limit of')} {worst:g}")
