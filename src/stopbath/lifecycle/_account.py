"""The account of a run: what the guardian knows and what its worker handed over, as one."""

from __future__ import annotations

import json
import os
import stat
from typing import Any

from stopbath.lifecycle._errors import Cause, Exit
from stopbath.lifecycle._report import OBEYED, SCHEMA, WorkerReport, cause_dict

__all__ = ["abandoned", "merge", "write_report"]


def merge(
    outer: dict[str, Any],
    inner: dict[str, Any] | None,
    foreign: list[dict[str, Any]],
    strays: list[dict[str, Any]],
    outlived: list[dict[str, Any]],
    *,
    run_id: str,
    asked_by: str,
) -> dict[str, Any]:
    """Make one account of a run from the guardian's own and the server's.

    `inner` is what the server handed over before it left: `groups`, `cause` and
    `unfinished_requests`. Without it (the server was killed) the ranks are accounted for by
    `foreign`, what the keeper told of them; `outlived` are those of them that nothing could end.
    `retired` are groups that ended before and were replaced: told, and no fault of this stop.
    """
    groups = inner["groups"] if inner else []
    retired = inner.get("retired", []) if inner else []
    workers = list(outer["workers"])
    for group in groups:
        workers += group["workers"]
    known = {worker["pid"] for worker in workers}
    known |= {worker["pid"] for group in retired for worker in group["workers"]}
    untold = [it for it in foreign if it["pid"] not in known]
    workers += [_killed(it, rank) for rank, it in enumerate(untold)]
    cause = next((group["cause"] for group in groups if group["cause"]), outer["cause"])
    survivors = outer["survivors"] + [one for group in groups for one in group["survivors"]]
    named = {survivor["pid"] for survivor in survivors}
    survivors += [survivor for survivor in outlived if survivor["pid"] not in named]
    all_strays = outer["strays"] + strays
    seen = {stray["pid"] for stray in all_strays}
    all_strays += [it for group in groups for it in group["strays"] if it["pid"] not in seen]
    return outer | {
        "run_id": run_id,
        "groups": [outer["group"], *(group["group"] for group in groups)],
        "cause": cause,
        "asked_by": asked_by or outer["asked_by"],
        "clean": cause is None
        and not survivors
        and all(group["clean"] for group in (outer, *groups))
        and all(worker["outcome"] in OBEYED for worker in workers),
        "unfinished_requests": inner["unfinished_requests"] if inner else None,
        "workers": workers,
        "retired": retired,
        "strays": all_strays,
        "survivors": survivors,
        "swept": {},
        "devices": [],
    }


def abandoned(run_id: str, ended: list[dict[str, Any]]) -> dict[str, Any]:
    """Give the keeper's account of a run whose guardian was killed; `ended` is what it reaped."""
    workers = [
        WorkerReport(
            it["name"], rank, it["pid"], "killed", Exit(it["code"], it["signal"]), (), None, ()
        ).to_dict()
        for rank, it in enumerate(ended)
    ]
    cause = Cause("guardian", None, "running", "was killed", None, ())
    return {
        "schema": SCHEMA,
        "run_id": run_id,
        "groups": [],
        "cause": cause_dict(cause),
        "asked_by": "a fault",
        "clean": False,
        "workers": workers,
        "strays": [],
        "survivors": [],
        "swept": {},
        "devices": [],
        "unfinished_requests": None,
    }


def _killed(told: dict[str, Any], rank: int) -> dict[str, Any]:
    end = None if told["exit"] is None else Exit(**told["exit"])
    return WorkerReport(
        told["name"], rank, told["pid"], "killed" if end else "survived", end, (), None, ()
    ).to_dict()


def write_report(path: str, report: dict[str, Any]) -> str | None:
    """Write a report, beside its target and renamed; gives what went wrong, or None.

    A target that is no regular file, or cannot be renamed over (a bind-mounted
    /dev/termination-log), is written in place.
    """
    data = json.dumps(report, indent=2).encode() + b"\n"
    beside = f"{path}.{os.getpid()}.part"
    try:
        if not os.path.exists(path) or stat.S_ISREG(os.stat(path).st_mode):
            try:
                _write(beside, data)
                os.replace(beside, path)
            except OSError:
                _remove(beside)
            else:
                return None
        _write(path, data)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return  # was never made
