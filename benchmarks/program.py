"""A program with four ranks, for the bench that kills it."""

from __future__ import annotations

import sys

from benchmarks.workers import cooperative
from stopbath.lifecycle import Deadline, WorkerGroup, WorkerSpec

if __name__ == "__main__":
    group = WorkerGroup("bench", [WorkerSpec(cooperative, name=f"rank{i}") for i in range(4)])
    group.start()
    group.wait_ready(Deadline.after(30))
    print(*(worker.pid for worker in group.workers), flush=True)
    sys.stdin.read()
    group.shutdown()
