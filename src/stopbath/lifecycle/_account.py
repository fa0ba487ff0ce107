"""The account of a run: what the guardian knows and what its worker handed over, as one."""

from __future__ import annotations

import errno
import json
import os
import select
import stat
from typing import Any

from stopbath.lifecycle._errors import LOST_KEEPER, Cause, Exit
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
    causes = [group["cause"] for group in groups if group["cause"]]
    # The keeper's end is everybody's; of the server's ranks it is said where the server lives on
    # for a moment, and our own word on the server is the same in every case.
    own = [cause for cause in causes if cause["what"] != LOST_KEEPER]
    cause = next((one for one in (*own, outer["cause"], *causes) if one), None)
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

    A target that is no regular file (a link to /dev/stdout, a pipe), or cannot be renamed over (a
    bind-mounted /dev/termination-log), is written in place. Never waits long, and a full disk
    leaves the old report as it was.
    """
    data = json.dumps(report, indent=2).encode() + b"\n"
    try:
        if not _write_beside(path, data):
            _write_in_place(path, data)
    except OSError as error:
        return f"{path}: {_WHY.get(error.errno or 0, error.strerror)}"
    return None


_READER_S = 1.0  # for the reader of a pipe to make room
_IN_PLACE = {errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS}
_WHY = {errno.ENXIO: "nobody reads it", errno.ETIMEDOUT: "its reader does not read"}


def _write_beside(path: str, data: bytes) -> bool:
    """Write a new file and rename it over the target; False where only the target itself can be."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        return False
    beside = f"{path}.{os.getpid()}.part"
    try:
        with open(beside, "wb") as file:
            file.write(data)
        os.replace(beside, path)
    except OSError as error:
        _remove(beside)
        if error.errno in _IN_PLACE:
            return False
        raise
    return True


def _write_in_place(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
        if regular:
            _reserve(fd, len(data))
        view, poll = memoryview(data), select.poll()
        poll.register(fd, select.POLLOUT)
        while view:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                if not poll.poll(_READER_S * 1000):
                    raise OSError(errno.ETIMEDOUT, "a full pipe") from None
        if regular:
            os.ftruncate(fd, len(data))
    finally:
        os.close(fd)


def _reserve(fd: int, size: int) -> None:
    """Take the room first, so that a full disk is known before anything is written over."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}:
            raise


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return  # was never made
