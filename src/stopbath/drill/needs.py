"""What a scenario needs of the host, and why it may not have it."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from stopbath.lifecycle._containment import freezer_v1

__all__ = ["freezer", "full_device", "gpu", "option", "own_pids"]


@cache
def freezer() -> str:
    """The freezer of cgroup v1 holds a process that SIGKILL does not end; root may use it."""
    home = freezer_v1()
    if home is None:
        return "no cgroup v1 freezer on this host: nothing here can be made unkillable"
    return "" if os.access(home, os.W_OK) else "the cgroup v1 freezer is root's alone"


@cache
def own_pids() -> str:
    """A process can be PID 1 of a namespace of its own."""
    if shutil.which("unshare") is None:
        return "unshare(1) is not installed"
    tried = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "true"],
        capture_output=True,
        check=False,
        timeout=10,
    )
    return "" if tried.returncode == 0 else "a PID namespace is not permitted to this user"


def full_device() -> str:
    """/dev/full answers every write with ENOSPC."""
    return "" if Path("/dev/full").exists() else "no /dev/full on this host"


@cache
def option(word: str) -> str:
    """`stopbath run` knows this option."""
    from subprocess import run
    from sys import executable

    text = run(
        [executable, "-m", "stopbath", "run", "--help"], capture_output=True, check=False, text=True
    ).stdout
    return "" if word in text else f"this version's `run` has no {word}"


@cache
def gpu() -> str:
    """There is an NVIDIA device, its ledger can be read, and torch can use it.

    Elsewhere a simulated one stands in; this says why.
    """
    from importlib.util import find_spec

    if not Path("/dev/nvidiactl").exists():
        return "no NVIDIA device on this host"
    if find_spec("pynvml") is None or find_spec("torch") is None:
        return "needs torch and the nvidia extra"
    return ""
