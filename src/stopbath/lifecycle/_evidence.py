"""What /proc knows of a process that will not end."""

from __future__ import annotations

import os

from stopbath.lifecycle._report import Survivor

__all__ = ["survivor_of"]


def survivor_of(pid: int, name: str, last_step: str) -> Survivor:
    """Collect evidence about a process that will not end.

    `stat`, `wchan` and `status` do not take the memory map's lock, which a stuck process may
    hold; `cmdline`, `maps` and `environ` do, and are left alone.
    """
    evidence = {name: _proc(pid, name) for name in ("wchan", "syscall", "status")}
    status = dict(
        line.split(":\t", 1) for line in evidence.pop("status").splitlines() if ":\t" in line
    )
    evidence |= {key: status[key].strip() for key in ("VmRSS", "Threads") if key in status}
    uid = (status.get("Uid", "").split() or [str(os.geteuid())])[0]
    if uid != str(os.geteuid()):
        evidence["why"] = f"of user {uid}: not ours to signal"
    state = status.get("State", "unknown").strip()
    return Survivor(pid, name, state, evidence["wchan"], last_step, evidence)


def _proc(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/{name}", encoding="utf-8", errors="replace") as file:
            return file.read(4096).strip()
    except OSError as error:
        return f"unreadable: {error.strerror}"
