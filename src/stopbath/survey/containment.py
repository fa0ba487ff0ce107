"""How well this host lets processes be held together: the guarantee each means gives."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from stopbath.lifecycle._containment import freezer_v1, own_cgroup
from stopbath.survey.finding import Finding, kernel_value

__all__ = ["cgroup", "first_process", "freezer", "pid_namespace", "subreaper"]

_PROBE_S = 5.0
_REAP_S = 0.2
_UNSHARE_PID = (
    "import ctypes, sys; c = ctypes.CDLL(None, use_errno=True);"
    "sys.exit(0 if c.unshare(0x20000000 | {flags}) == 0 else 1)"
)
_NEW_USER = 0x10000000
_REAPING = ("systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "s6-svscan")


def subreaper() -> Finding:
    """Subreaping is everywhere on Linux (prctl(2), since 3.4)."""
    if sys.platform != "linux":
        return Finding(
            "subreaper",
            "warning",
            f"{sys.platform} has none",
            "what leaves its session when its parent dies can only be found by its run's mark",
            "run on Linux where the guarantee is needed",
        )
    return Finding(
        "subreaper", "good", "what a worker leaves comes back to the keeper and is ended there"
    )


def cgroup() -> Finding:
    """Try it: only making one tells whether it may be made."""
    own = own_cgroup()
    if own is None:
        return Finding(
            "cgroup v2",
            "note",
            "not mounted here",
            "strays are ended process by process instead of in one write; the library face "
            "cannot reach what left its session if the keeper is killed",
            "mount cgroup2, or run the container with a private cgroup namespace",
        )
    probe = Path(own) / f"stopbath-doctor-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError as error:
        return Finding(
            "cgroup v2",
            "note",
            f"{own} is not delegated: {error.strerror}",
            "strays are ended process by process instead of in one write",
            "systemd: Delegate=yes in the unit, or systemd-run --user --scope -p Delegate=yes; "
            "docker: --cgroupns=private with a writable /sys/fs/cgroup",
        )
    can_kill = (probe / "cgroup.kill").exists()
    probe.rmdir()
    if not can_kill:
        return Finding(
            "cgroup v2",
            "note",
            f"{own} is delegated, without cgroup.kill",
            "strays are ended process by process instead of in one write",
            "a kernel of 5.14 or newer",
        )
    return Finding("cgroup v2", "good", f"each worker gets its own below {own}")


def pid_namespace() -> Finding:
    """Try it in a process of its own, which ends with the question."""
    if _can_unshare(0):
        return Finding("PID namespace", "good", "possible: run --isolate pid leaves nothing")
    if _can_unshare(_NEW_USER):
        return Finding("PID namespace", "good", "possible inside a user namespace")
    return Finding(
        "PID namespace",
        "note",
        "not permitted",
        "guardian and keeper killed in the same instant leave processes to the next start's "
        "sweep, or to stopbath sweep",
        "CAP_SYS_ADMIN, or unprivileged user namespaces (user.max_user_namespaces, "
        "kernel.apparmor_restrict_unprivileged_userns)",
    )


def _can_unshare(flags: int) -> bool:
    argv = [sys.executable, "-I", "-S", "-c", _UNSHARE_PID.format(flags=flags)]
    try:
        return subprocess.run(argv, timeout=_PROBE_S, check=False).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def freezer() -> Finding:
    """A frozen task ignores SIGKILL: worth knowing when something cannot be ended."""
    where = freezer_v1()
    if where is None:
        return Finding("freezer v1", "good", "not mounted: nothing frozen can outlast SIGKILL")
    return Finding(
        "freezer v1",
        "note",
        f"mounted at {where}",
        "a process that something froze there survives SIGKILL until it is thawed",
        f"echo THAWED > {where}/…/freezer.state; stopbath never freezes anything",
    )


def first_process() -> Finding:
    """PID 1 has to reap what is orphaned, and gets no signal it has no handler for."""
    name = (kernel_value("/proc/1/comm") or "?").strip()
    if os.getpid() == 1 or name.startswith("stopbath"):
        return Finding("PID 1", "good", "is stopbath, which reaps and passes signals on")
    if name in _REAPING:
        return Finding("PID 1", "good", f"is {name}, which reaps orphans")
    zombies = _orphaned_zombies()
    if zombies:
        time.sleep(_REAP_S)  # one that has just died is nobody's fault
        zombies &= _orphaned_zombies()
    return Finding(
        "PID 1",
        "warning" if zombies else "note",
        f"is {name}" + (f", which has not reaped {len(zombies)} zombies" if zombies else ""),
        "a PID 1 that does not reap keeps the pids of orphans taken, and ignores signals it has "
        "no handler for",
        "make stopbath the entry point of the container, or use docker run --init",
    )


def _orphaned_zombies() -> set[str]:
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        fields = (kernel_value(str(entry / "stat")) or "").rpartition(")")[2].split()
        if fields[:2] == ["Z", "1"]:
            found.add(entry.name)
    return found
