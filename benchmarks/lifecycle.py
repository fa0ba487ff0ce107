"""Stop, death, orphans, idleness, import time of the lifecycle layer."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.table import Bench, Row, row
from benchmarks.workers import cooperative, deaf, with_holder
from stopbath.lifecycle import (
    Deadline,
    Escalation,
    ProcessRef,
    WorkerContext,
    WorkerGroup,
    WorkerSpec,
)

__all__ = ["BENCHES", "until_dead"]

Target = Callable[[WorkerContext], None]


def _group(target: Target, count: int, escalation: Escalation | None = None) -> WorkerGroup:
    specs = [WorkerSpec(target, name=f"rank{i}") for i in range(count)]
    group = WorkerGroup("bench", specs, escalation=escalation)
    group.start()
    group.wait_ready(Deadline.after(60))
    return group


def _ms(since: float) -> float:
    return (time.perf_counter() - since) * 1e3


def stop() -> Iterator[Row]:
    """How much longer `shutdown()` takes than its slowest worker."""
    for count, repeat in ((2, 20), (16, 5), (64, 3)):
        took, over = [], []
        for _ in range(repeat):
            group = _group(cooperative, count)
            began = time.perf_counter()
            report = group.shutdown()
            took.append(_ms(began))
            slowest = max(worker.ended_at_s or 0.0 for worker in report.workers)
            over.append(took[-1] - slowest * 1e3)
        yield row(f"stop of {count} cooperative workers", took, "ms", "")
        yield row("  after the slowest worker had ended", over, "ms", "< 5")


def ignoring() -> Iterator[Row]:
    """How late SIGKILL ends a worker that ignores SIGTERM."""
    late = []
    for _ in range(5):
        group = _group(deaf, 1, Escalation(drain_s=0.1, terminate_s=0.4, kill_s=2))
        began = time.perf_counter()
        group.shutdown()
        late.append(_ms(began) - 500)
    yield row("one ignores SIGTERM: beyond its graces", late, "ms", "< 20")


def death() -> Iterator[Row]:
    """From SIGKILL of a rank to the callback, on an otherwise idle host."""
    for name, target, repeat in (
        ("rank death to on_failure", cooperative, 200),
        ("  with a forked child that holds its fds", with_holder, 100),
    ):
        took = []
        for _ in range(repeat):
            group = _group(target, 1)
            told = threading.Event()
            at: list[float] = []

            def note(_: object, at: list[float] = at, told: threading.Event = told) -> None:
                at.append(time.perf_counter())
                told.set()

            group.on_failure(note)
            pid = group.workers[0].pid
            assert pid is not None
            began = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            assert told.wait(10), "the callback never came"
            took.append((at[0] - began) * 1e3)
            group.shutdown()
        yield row(name, took, "ms", "p99 < 5")


def orphans() -> Iterator[Row]:
    """From SIGKILL of a program to the end of its last rank."""
    took = []
    for _ in range(20):
        with subprocess.Popen(
            [sys.executable, "-m", "benchmarks.program"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as program:
            assert program.stdout is not None
            refs = [ProcessRef.open(int(word)) for word in program.stdout.readline().split()]
            began = time.perf_counter()
            program.kill()
            took.append(until_dead(refs, began))
    yield row("kill -9 of a program: last of 4 ranks gone", took, "ms", "< 50")


def until_dead(refs: list[ProcessRef], began: float) -> float:
    """Wait for the end of every process; gives the milliseconds since `began`."""
    poll = select.poll()
    for ref in refs:
        poll.register(ref, select.POLLIN)
    left = len(refs)
    while left:
        for fd, _ in poll.poll(10_000):
            poll.unregister(fd)
            left -= 1
    took = _ms(began)
    for ref in refs:
        ref.close()
    return took


def idle() -> Iterator[Row]:
    """Context switches of the supervisor's thread and of the keeper, over ten idle seconds."""
    group = _group(cooperative, 4)
    supervisor = next(t for t in threading.enumerate() if t.name == "stopbath-supervisor")
    pid = group.workers[0].pid
    assert pid is not None
    status = Path(f"/proc/{pid}/status").read_text()
    keeper = next(line.split()[1] for line in status.splitlines() if line.startswith("PPid"))
    paths = [Path(f"/proc/self/task/{supervisor.native_id}/status"), Path(f"/proc/{keeper}/status")]
    time.sleep(1)  # what the start woke up has gone back to sleep
    before = [_switches(path) for path in paths]
    time.sleep(10)
    after = [_switches(path) for path in paths]
    group.shutdown()
    for name, was, now in zip(("supervisor", "keeper"), before, after, strict=True):
        yield Row(f"{name}: context switches in 10 idle s", now - was, now - was, "", "0")


def _switches(path: Path) -> int:
    return sum(int(line.split()[1]) for line in path.read_text().splitlines() if "ctxt" in line)


def imports() -> Iterator[Row]:
    """Import of the whole public surface, above a bare interpreter that has imported `time`."""
    code = (
        "import time; began = time.perf_counter(); import stopbath.lifecycle as it; "
        "[getattr(it, name) for name in it.__all__]; print(time.perf_counter() - began)"
    )
    took = [
        float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)
        * 1e3
        for _ in range(15)
    ]
    yield row("import of stopbath.lifecycle, all names", took, "ms", "< 40")


BENCHES: dict[str, Bench] = {
    "stop": stop,
    "ignoring": ignoring,
    "death": death,
    "orphans": orphans,
    "idle": idle,
    "import": imports,
}
