"""A launcher that starts a scheduler and its workers and serves HTTP, as SGLang's does.

Here the ranks are the group's own, so that the start is covered too: every rank's readiness is
raced with every rank's death, and whatever a rank leaves behind is ended with it.
Run it, kill a rank, send SIGTERM: `python examples/launcher_like_sglang.py`.
"""

from __future__ import annotations

import signal
import sys
import threading

from stopbath.lifecycle import (
    Deadline,
    Escalation,
    StartupError,
    WorkerContext,
    WorkerGroup,
    WorkerSpec,
)


def scheduler_process(ctx: WorkerContext, rank: int) -> None:
    """Be a rank: load, say ready, serve until asked to stop."""
    ctx.progress(f"loading shard {rank}")
    ctx.ready()
    ctx.wait_stop()


def launch(ranks: int) -> int:
    """Start, serve, stop; the exit code says how it went."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    group = WorkerGroup(
        "sglang",
        [WorkerSpec(scheduler_process, args=(i,), name=f"rank{i}") for i in range(ranks)],
        escalation=Escalation(drain_s=5, terminate_s=1, kill_s=1),
    )
    group.on_failure(lambda cause: (print(f"failed: {cause}", flush=True), stop.set()))
    group.start()
    try:
        group.wait_ready(Deadline.after(60))
        print("ready", *(worker.pid for worker in group.workers), flush=True)
        stop.wait()  # an HTTP server would run here
    except StartupError as error:
        print(error, flush=True)
        return 3
    finally:
        report = group.shutdown(Deadline.after(7))
    print(report, flush=True)
    return 0 if report.clean else 4


if __name__ == "__main__":
    sys.exit(launch(2))
