"""Imported by zygotes in tests: says where it was imported, and misbehaves there when told to.

Who preloads it chooses by the variable `BORN` in the environment of the first worker.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from stopbath.lifecycle import WorkerContext

IMPORTED_IN = os.getpid()


def _no_fork() -> NoReturn:
    raise BlockingIOError(11, "no process to be had")


def _misbehave(how: str) -> None:
    if how == "hangs":
        signal.pause()
    if how == "raises":
        raise ImportError("no such engine")
    if how == "exits":
        sys.exit(3)
    if how == "starts a thread":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "cannot fork":
        os.fork = _no_fork
    if how == "changes signals":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    if how == "leaves a process" and os.fork() == 0:
        signal.pause()


_misbehave(os.environ.get("BORN", ""))


def tells_where(ctx: WorkerContext) -> None:
    """Say which process has imported this module, and return when asked."""
    ctx.ready({"imported_in": IMPORTED_IN, "parent": os.getppid(), "session": os.getsid(0)})
    ctx.wait_stop()


def _prctl(option: int) -> int:
    number = ctypes.c_int(-1)
    assert ctypes.CDLL(None).prctl(option, ctypes.byref(number), 0, 0, 0) == 0
    return number.value


def _status(field: str) -> str:
    return Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0]


def tells_all(ctx: WorkerContext) -> None:
    """Say everything that a process is born with."""
    fds = {
        name: os.readlink(f"/proc/self/fd/{name}").partition(":")[0]  # noqa: PTH115
        for name in os.listdir("/proc/self/fd")  # noqa: PTH208
        if Path(f"/proc/self/fd/{name}").exists()
    }
    environ = {key: it for key, it in os.environ.items() if not key.startswith("STOPBATH_")}
    ctx.ready(
        {
            "argv": sys.argv,
            "path": sys.path,
            "cwd": str(Path.cwd()),
            "environ": environ,
            "fds": fds,
            "ignored": _status("SigIgn"),
            "blocked": _status("SigBlk"),
            "sigint": repr(signal.getsignal(signal.SIGINT)),
            "sigterm": repr(signal.getsignal(signal.SIGTERM)),
            "parent-death signal": _prctl(2),
            "subreaper": _prctl(37),
            "leads": (os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()),
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "flags": repr(sys.flags),
            "executable": sys.executable,
            "prefix": sys.prefix,
        }
    )
    ctx.wait_stop()


def has_a_group(ctx: WorkerContext, preload: list[str]) -> None:
    """Be a worker that starts workers through the keeper it came from."""
    from stopbath.lifecycle import Deadline, WorkerGroup, WorkerSpec

    supervisor = ctx.supervisor()
    supervisor.start_thread()
    group = WorkerGroup(
        "inner", [WorkerSpec("born:tells_where", preload=preload)], supervisor=supervisor
    )
    group.start()
    group.wait_ready(Deadline.after(20))
    inner: Any = group.workers[0].info
    ctx.ready({"pid": group.workers[0].pid, **inner})
    ctx.wait_stop()
    group.shutdown()
