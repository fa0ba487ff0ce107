"""A snapshot of the host's processes, with what is asked about each only where it is shown."""

from __future__ import annotations

from typing import NamedTuple

import psutil

from stopbath.lifecycle._process import read_stat

__all__ = ["Process", "listening_ports", "snapshot"]


class Process(NamedTuple):
    """One process. Memory resident, in bytes; age in seconds; `start` in ticks since boot."""

    pid: int
    ppid: int
    start: int
    user: str
    argv: tuple[str, ...]
    name: str
    state: str
    age_s: float
    memory_bytes: int


_ASKED = ("pid", "ppid", "username", "cmdline", "name", "status", "create_time", "memory_info")


def snapshot(now: float) -> dict[int, Process]:
    """Look at every process that may be looked at; `now` is the wall clock's, for the ages.

    What /proc hides (hidepid, another user's command line) is simply not there.
    """
    found = {}
    for one in psutil.process_iter(_ASKED, ad_value=None):
        info = one.info
        stat = read_stat(one.pid)
        memory = info["memory_info"]
        found[one.pid] = Process(
            pid=one.pid,
            ppid=info["ppid"] or 0,
            start=stat.start if stat is not None else 0,
            user=info["username"] or "?",
            argv=tuple(info["cmdline"] or ()),
            name=info["name"] or "?",
            state=info["status"] or "?",
            age_s=max(0.0, now - info["create_time"]) if info["create_time"] else 0.0,
            memory_bytes=memory.rss if memory is not None else 0,
        )
    return found


def listening_ports() -> dict[int, list[int]]:
    """Give the TCP ports each process listens on; other users' only where that may be seen."""
    ports: dict[int, set[int]] = {}
    try:
        for one in psutil.net_connections(kind="tcp"):
            if one.status == psutil.CONN_LISTEN and one.pid is not None:
                ports.setdefault(one.pid, set()).add(one.laddr.port)
    except (psutil.Error, OSError):
        return {}
    return {pid: sorted(found) for pid, found in ports.items()}
