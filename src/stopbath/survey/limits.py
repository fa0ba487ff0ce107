"""Limits and settings of this host that decide how a stop, a crash or a start goes."""

from __future__ import annotations

import os
import resource

from stopbath.lifecycle._registry import usable
from stopbath.survey.finding import Finding, gib, kernel_value

__all__ = [
    "clocks",
    "core_dumps",
    "hidden_processes",
    "open_files",
    "processes",
    "ptrace",
    "runtime_directory",
    "shared_memory",
]

_SHM = "/dev/shm"  # noqa: S108  (where the kernel has it)
_ENOUGH_SHM = 1 << 30
_ENOUGH_FILES = 4096
_ENOUGH_PROCESSES = 4096


def shared_memory() -> Finding:
    """A full /dev/shm is SIGBUS for whoever writes to it, not an error."""
    try:
        found = os.statvfs(_SHM)
    except OSError as error:
        return Finding(
            "shared memory",
            "note",
            f"{_SHM}: {error.strerror}",
            "stopbath uses none by name; commands that do will fail",
            f"mount a tmpfs at {_SHM}",
        )
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    what = f"{gib(free)} free of {gib(total)} in {_SHM}"
    if free >= _ENOUGH_SHM:
        return Finding("shared memory", "good", what)
    return Finding(
        "shared memory",
        "warning",
        what,
        "stopbath's own ranks use none by name; NCCL and data loaders of a wrapped command die "
        "of SIGBUS (exit code 135) when it is full",
        "docker run --shm-size=8g, or an emptyDir with medium: Memory; stopbath sweep for what "
        "dead runs left",
    )


def open_files() -> Finding:
    """Each worker costs its supervisor and its keeper a handful of descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    what = f"{_limit(soft)} (hard {_limit(hard)})"
    if soft == resource.RLIM_INFINITY or soft >= _ENOUGH_FILES:
        return Finding("open files", "good", what)
    return Finding(
        "open files",
        "note",
        what,
        "enough for some hundred workers; a server with many clients may run out",
        "ulimit -n 65536, or LimitNOFILE= in the unit",
    )


def processes() -> Finding:
    """A stop forks nothing, but a start that meets the limit fails half way."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    pids = kernel_value("/proc/sys/kernel/pid_max") or "?"
    what = f"{_limit(soft)} for this user, pid_max {pids}"
    if soft == resource.RLIM_INFINITY or soft >= _ENOUGH_PROCESSES:
        return Finding("processes", "good", what)
    return Finding(
        "processes",
        "warning",
        what,
        "threads count too: one rank of torch takes dozens, and a start fails half way",
        "ulimit -u, LimitNPROC= or the container's pids limit",
    )


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def core_dumps() -> Finding:
    """A dump of 80 GiB is written before the death of its process is told to anybody."""
    pattern = kernel_value("/proc/sys/kernel/core_pattern") or "?"
    soft, _ = resource.getrlimit(resource.RLIMIT_CORE)
    piped = pattern.startswith("|")
    if soft == 0 and not piped:
        return Finding("core dumps", "good", "off: a crash is noticed at once")
    return Finding(
        "core dumps",
        "note",
        f"limit {_limit(soft)}, pattern {pattern}",
        "a crashing rank is told dead only after its memory was written, and the dump may fill "
        "the disk",
        "ulimit -c 0 (LimitCORE=0), or PR_SET_DUMPABLE in the rank",
    )


def ptrace() -> Finding:
    """Stack dumps of a stuck rank from outside need it; those by signal do not."""
    scope = kernel_value("/proc/sys/kernel/yama/ptrace_scope")
    if scope in (None, "0", "1") or os.geteuid() == 0:
        said = "no restriction" if scope is None else f"scope {scope}"
        return Finding("ptrace", "good", f"{said}: py-spy can look at what stopbath started")
    return Finding(
        "ptrace",
        "note",
        f"scope {scope}",
        "py-spy cannot look at a stuck rank; its own stack dump (faulthandler) still works",
        "kernel.yama.ptrace_scope=1, or SYS_PTRACE in the container",
    )


def hidden_processes() -> Finding:
    """With hidepid, other users' processes are not there to be seen."""
    mounts = (line.split() for line in (kernel_value("/proc/self/mounts") or "").splitlines())
    options = [word for it in mounts if it[1:3] == ["/proc", "proc"] for word in it[3].split(",")]
    word = next((word for word in options if word.startswith("hidepid=")), "")
    if not word or word in ("hidepid=0", "hidepid=off") or os.geteuid() == 0:
        return Finding("hidepid", "good", "every process can be seen")
    return Finding(
        "hidepid",
        "note",
        f"/proc is mounted with {word}",
        "ps and sweep see this user's processes only, and cannot say who else holds a device",
        "run them as root, or put the user into the group of gid=",
    )


def clocks() -> Finding:
    """Deadlines are monotonic; a clocksource that is slow to read makes every one cost."""
    source = kernel_value("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source in ("hpet", "acpi_pm"):
        return Finding(
            "clocks",
            "note",
            f"clocksource {source}",
            "reading the time is a system call of a microsecond: latencies are noisier",
            "tsc or kvm-clock, where the machine has it",
        )
    said = f" ({source})" if source else ""
    return Finding("clocks", "good", f"monotonic{said}: a step of the wall clock moves no deadline")


def runtime_directory() -> Finding:
    """Register a run and take it back: only doing it tells whether it can be done."""
    where, problem = usable()
    if not problem:
        return Finding("runtime directory", "good", f"runs are registered in {where}")
    return Finding(
        "runtime directory",
        "warning",
        f"{where}: {problem}",
        "runs are not registered: ps does not know them, and what a run leaves whose guardian "
        "and keeper were both killed is not swept",
        "XDG_RUNTIME_DIR or TMPDIR on a directory of this user with mode 0700",
    )
