"""The account of a stop: which step ended whom and when, and what is still alive."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from stopbath.lifecycle._errors import Cause, Exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "OBEYED",
    "Outcome",
    "ShutdownReport",
    "StepTaken",
    "Survivor",
    "WorkerReport",
    "render",
]

SCHEMA = "stopbath.shutdown/1"

Outcome = Literal["drained", "terminated", "killed", "exited", "survived"]


OBEYED = ("drained", "terminated", "exited")


class StepTaken(NamedTuple):
    """A step done to a worker, in seconds after the stop began; `error` when it failed."""

    step: str
    at_s: float
    error: str | None = None


class WorkerReport(NamedTuple):
    """How one worker ended."""

    name: str
    rank: int
    pid: int | None
    outcome: Outcome
    exit: Exit | None
    steps: tuple[StepTaken, ...]
    ended_at_s: float | None
    last_stderr: tuple[str, ...]
    crashed: bool = False  # asked to finish, it ended by an error of its own

    def to_dict(self) -> dict[str, Any]:
        """Give JSON-able data in the published schema."""
        return {
            "name": self.name,
            "role": "monolithic",
            "rank": self.rank,
            "pid": self.pid,
            "outcome": self.outcome,
            "exit": None if self.exit is None else dict(self.exit._asdict()),
            "steps": [
                {"step": taken.step, "at_s": round(taken.at_s, 4)}
                | ({} if taken.error is None else {"error": taken.error})
                for taken in self.steps
            ],
            "ended_at_s": None if self.ended_at_s is None else round(self.ended_at_s, 4),
            "last_stderr": list(self.last_stderr),
        }


class Survivor(NamedTuple):
    """A process alive after the last step, with what /proc says about why."""

    pid: int
    name: str
    state: str
    wchan: str
    last_step: str
    evidence: dict[str, str]


class ShutdownReport(NamedTuple):
    """What one stop of a group did. Times in seconds; `started_at` in ISO 8601, UTC."""

    group: str
    cause: Cause | None
    asked_by: str
    started_at: str
    duration_s: float
    workers: tuple[WorkerReport, ...]
    strays: tuple[dict[str, Any], ...]
    survivors: tuple[Survivor, ...]

    @property
    def clean(self) -> bool:
        """Whether the stop was asked for, nobody had to be killed and nothing is left."""
        return (
            self.cause is None
            and not self.survivors
            and all(it.outcome in OBEYED and not it.crashed for it in self.workers)
        )

    def to_dict(self) -> dict[str, Any]:
        """Give JSON-able data in the published schema."""
        return {
            "schema": SCHEMA,
            "group": self.group,
            "cause": cause_dict(self.cause),
            "asked_by": self.asked_by,
            "started_at": self.started_at,
            "duration_s": round(self.duration_s, 4),
            "clean": self.clean,
            "workers": [worker.to_dict() for worker in self.workers],
            "strays": list(self.strays),
            "survivors": [dict(survivor._asdict()) for survivor in self.survivors],
        }

    def to_json(self) -> str:
        """Give the published schema as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return "\n".join(render(self.to_dict()))


def cause_dict(cause: Cause | None) -> dict[str, Any] | None:
    """Give a cause as JSON-able data."""
    if cause is None:
        return None
    return {
        "worker": cause.worker,
        "pid": cause.pid,
        "phase": cause.phase,
        "what": cause.what,
        "exit": None if cause.exit is None else dict(cause.exit._asdict()),
        "last_stderr": list(cause.last_stderr),
        "message": str(cause),
    }


def render(report: dict[str, Any], width: int = 80) -> list[str]:
    """Lay a report out in plain lines for a person; table rows are cut to `width` columns."""
    state = "clean" if report["clean"] else "NOT clean"
    lines = [f"stopped in {report['duration_s']:.2f} s, {state} (asked by {report['asked_by']})"]
    if report["cause"]:
        lines.append(f"cause: {report['cause']['message']}")
    if report.get("unfinished_requests"):
        lines.append(f"unfinished requests: {report['unfinished_requests']}")
    rows = []
    for worker in report["workers"]:
        at = "" if worker["ended_at_s"] is None else f"{worker['ended_at_s']:.3f} s"
        end = "" if worker["exit"] is None else str(Exit(**worker["exit"]))
        rows.append(
            f"  {worker['name']:<20.20} {worker['pid'] or '-':>8} {worker['outcome']:<10} "
            f"{at:>9}  {end}"
        )
    rows += _listed("stray", report["strays"], lambda it: f"{it['outcome']:<10} {it['argv']}")
    rows += _listed(
        "survivor",
        report["survivors"],
        lambda it: f"{it['name']} {it['evidence'].get('why') or _where(it)}",
    )
    if any(device["left"] for device in report.get("devices", ())):
        from stopbath.lifecycle._ledger import render_devices

        rows += [f"  {line}" for line in render_devices(report["devices"])]
    return lines + [row if len(row) <= width else row[: width - 1] + "…" for row in rows]


def _where(survivor: dict[str, Any]) -> str:
    return f"in state {survivor['state']} {survivor['wchan']}"


def _listed(kind: str, items: Iterable[dict[str, Any]], say: Callable[[Any], str]) -> list[str]:
    return [f"  {kind:<20} {item['pid']:>8} {say(item)}" for item in items]
