"""`stopbath run` beside what people put in front of a server: cost, and what each leaves behind.

One command under each wrapper, five ways in which its processes escape. The wrapper gets the
signal a service manager would send (SIGTERM; in the last case SIGKILL), and what of the tree is
alive after a bound is counted, then ended by identity. What is not installed is said.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.resources import pss_mb
from benchmarks.table import Bench, Row, row
from stopbath.lifecycle import ProcessRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["BENCHES", "table"]

_BIN = Path(sys.executable).parent
_BOUND_S = 6.5  # honcho waits 5 s before it kills; the others are done long before
_STARTS = 15
_MARK = "STOPBATH_BENCH_OF"


class Wrapper(NamedTuple):
    """A way to run a command: what it is called, its program, what stands before the command."""

    name: str
    program: str
    before: tuple[str, ...]
    package: str


def _wrappers(folder: Path) -> list[Wrapper]:
    run = (str(_BIN / "stopbath"), "run", "--drain", "1", "--terminate", "1", "--kill", "1")
    return [
        Wrapper("nothing", "sh", (), ""),
        Wrapper("stopbath run", run[0], (*run, "--"), ""),
        Wrapper("stopbath run, PID ns", run[0], (*run, "--isolate", "pid", "--"), ""),
        Wrapper("tini -s -g", "tini", ("tini", "-s", "-g", "--"), "Debian: tini"),
        Wrapper("dumb-init", "dumb-init", ("dumb-init", "--"), "Debian: dumb-init"),
        Wrapper("setsid -w", "setsid", ("setsid", "-w"), "Debian: util-linux"),
        Wrapper("timeout -k 1", "timeout", ("timeout", "-k", "1", "1d"), "Debian: coreutils"),
        Wrapper(
            "honcho start",
            str(_BIN / "honcho"),
            (str(_BIN / "honcho"), "-f", str(folder / "Procfile"), "start"),
            "PyPI: honcho",
        ),
        Wrapper(
            "systemd-run --scope",
            "systemd-run",
            ("systemd-run", "--scope", "--quiet", "--collect"),
            "Debian: systemd",
        ),
    ]


def _missing(wrapper: Wrapper) -> str:
    if shutil.which(wrapper.program) is None:
        return f"not installed ({wrapper.package})"
    if wrapper.program == "systemd-run" and not Path("/run/systemd/system").exists():
        return "systemd does not run here"
    if "PID ns" in wrapper.name and os.geteuid() != 0:
        return "needs root"
    return ""


# The command's main process ends at SIGTERM; each case adds what is hard about its children.
_CASES = {
    "child": "sleep 300 & wait",
    "setsid": "setsid sleep 300 & wait",
    "double fork": "(setsid sh -c 'sleep 300 & exit' &); sleep 300 & wait",
    "deaf": """setsid sh -c 'trap "" TERM INT HUP; while :; do sleep 1; done' & wait""",
    "kill -9": "setsid sleep 300 & sleep 300 & wait",
}


def _alive(run: str) -> list[int]:
    """Find what carries this bench's mark in its environment, zombies left out."""
    mark = f"{_MARK}={run}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _start(
    wrapper: Wrapper, command: str, folder: Path, run: str, out: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    argv = [*wrapper.before, "sh", "-c", command]
    if "honcho" in wrapper.program:
        (folder / "command").write_text(command + "\n")
        (folder / "Procfile").write_text(f"command: sh {folder / 'command'}\n")
        argv = list(wrapper.before)
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, _MARK: run, "TMPDIR": str(folder)},
    )


def _left(wrapper: Wrapper, case: str, folder: Path) -> int:
    """Run one case; give how many of its processes are alive at the bound."""
    run = f"{os.getpid()}-{time.monotonic_ns()}"
    ready = folder / f"ready-{run}"
    process = _start(
        wrapper, f"{_CASES[case].replace('wait', f'touch {ready}; wait')}", folder, run
    )
    _until(ready.exists)
    _until(lambda: sum(b"sleep" in _argv(pid) for pid in _alive(run)) >= _sleepers(case))
    process.send_signal(signal.SIGKILL if case == "kill -9" else signal.SIGTERM)
    until = time.monotonic() + _BOUND_S
    while _alive(run) and time.monotonic() < until:
        process.poll()
        time.sleep(0.02)
    left = len(_alive(run))
    while pids := _alive(run):  # a supervisor may restart what is killed before it is itself
        for pid in pids:
            try:
                ref = ProcessRef.open(pid)
            except ProcessLookupError:
                continue
            ref.send(signal.SIGKILL)
            ref.dead(wait_s=1)
            ref.close()
        process.poll()
    process.wait()
    return left


def _sleepers(case: str) -> int:
    return 2 if case in {"double fork", "kill -9"} else 1


def _argv(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not true():
        assert time.monotonic() < until, "the command never came to be"
        time.sleep(0.005)


class Overhead(NamedTuple):
    """Milliseconds until the command runs, until all has ended, and of CPU time in between."""

    running: float
    ended: float
    cpu: float


def _overheads(wrapper: Wrapper, folder: Path) -> list[Overhead]:
    found = []
    for _ in range(_STARTS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        process = _start(wrapper, "echo", folder, "start", subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.read(1)
        running = time.perf_counter()
        process.stdout.close()
        process.wait()
        ended = time.perf_counter()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        times = running - began, ended - began, cpu
        found.append(Overhead(*(time_s * 1e3 for time_s in times)))
    return found


def _overhead_ms(wrapper: Wrapper, folder: Path) -> float:
    return statistics.median(it.ended for it in _overheads(wrapper, folder))


def _memory_mb(wrapper: Wrapper, folder: Path) -> float:
    """Proportional set size (Pss) of everything that is not the command's shell and its child."""
    run = f"{os.getpid()}-{time.monotonic_ns()}"
    process = _start(wrapper, "exec sleep 300", folder, run)
    _until(lambda: any(b"sleep" in _argv(pid)[:6] for pid in _alive(run)))
    time.sleep(0.7)
    total = 0.0
    for pid in _alive(run):
        if not _argv(pid).startswith(b"sleep") and b"sh\0-c\0exec" not in _argv(pid)[:12]:
            total += pss_mb(pid)
    process.send_signal(signal.SIGTERM)
    process.wait()
    return total


def table() -> Iterator[str]:
    """Give the lines of the table: start, memory, and what is left in each case."""
    yield f"{'in front of the command':<22} {'start':>8} {'Pss':>8}   left: " + "  ".join(_CASES)
    with tempfile.TemporaryDirectory(prefix="sbbench") as name:
        folder = Path(name)
        plain = 0.0
        for wrapper in _wrappers(folder):
            if why := _missing(wrapper):
                yield f"{wrapper.name:<22} {why}"
                continue
            start = _overhead_ms(wrapper, folder)
            plain = plain or start
            memory = _memory_mb(wrapper, folder) if wrapper.before else 0.0
            left = [_left(wrapper, case, folder) for case in _CASES]
            cells = "  ".join(f"{n:>{len(case)}}" for n, case in zip(left, _CASES, strict=True))
            yield f"{wrapper.name:<22} {start - plain:>5.1f} ms {memory:>5.1f} MB         {cells}"


def wrappers() -> Iterator[Row]:
    """Print the whole table, then the figures that have goals as rows of the bench."""
    for line in table():
        print(line, flush=True)
    yield from start()


def start() -> Iterator[Row]:
    """Give what `run` adds to a command: time, CPU time and memory. Seconds, not minutes."""
    with tempfile.TemporaryDirectory(prefix="sbbench") as name:
        folder = Path(name)
        plain, ours, *_ = _wrappers(folder)
        alone, with_us = _overheads(plain, folder), _overheads(ours, folder)
        kinds = ("to the command", "to the end of all", "CPU time")
        for i, (what, goal) in enumerate(zip(kinds, ("< 80", "", ""), strict=True)):
            own = statistics.median(it[i] for it in alone)
            yield row(f"run: {what}, beyond its own", [it[i] - own for it in with_us], "ms", goal)
        yield row("run: Pss of guardian and keeper", [_memory_mb(ours, folder)], "MB", "< 16")


BENCHES: dict[str, Bench] = {"start": start, "wrappers": wrappers}
