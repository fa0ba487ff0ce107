"""How long eight session-hopping forkers outlive their worker, with and without a cgroup.

    python -m benchmarks.containment

Each forker forks, leaves its session and lets its parent end, as fast as it can. All of them
hold the write end of one pipe: its end of file is the moment at which none is alive. The rows
without a cgroup need root: they run in a mount namespace in which cgroup v2 is not mounted.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.table import row
from stopbath.lifecycle import Deadline, ProcessRef, WorkerGroup, WorkerSpec
from stopbath.lifecycle._containment import own_cgroup

if TYPE_CHECKING:
    from stopbath.lifecycle import WorkerContext

_ROUNDS, _FORKERS, _BOUND_S = 15, 8, 20.0


def hops(ctx: WorkerContext) -> None:
    """Start forkers that never stay in one session or below one parent."""
    for _ in range(_FORKERS):
        if os.fork() == 0:
            while True:
                if os.fork() != 0:
                    os._exit(0)
                os.setsid()
    ctx.ready()
    ctx.wait_stop()


def once() -> float:
    """Kill a worker whose forkers hop; milliseconds until none is alive."""
    read_end, write_end = os.pipe()
    spec = WorkerSpec("benchmarks.containment:hops", name="hopper", fds={"held": write_end})
    group = WorkerGroup("bench", [spec])
    group.start()
    os.close(write_end)
    group.wait_ready(Deadline.after(30))
    time.sleep(0.05)  # let them hop
    ref = ProcessRef.open(group.workers[0].pid or 0)
    began = time.perf_counter()
    ref.send(signal.SIGKILL)
    ready, _, _ = select.select([read_end], [], [], _BOUND_S)
    took = (time.perf_counter() - began) * 1e3 if ready else float("inf")
    ref.close()
    group.shutdown(Deadline.after(_BOUND_S))
    os.close(read_end)
    return took


def main() -> None:
    """Print one row here, and one from a place without a cgroup."""
    there = own_cgroup() is not None
    what = f"{_FORKERS} hopping forkers {'with' if there else 'without'} a cgroup"
    print(row(what, [once() for _ in range(_ROUNDS)], "ms", "").line(), flush=True)
    if there and os.geteuid() == 0:
        command = 'umount -a -t cgroup2 && exec "$@"'
        again = [sys.executable, "-m", "benchmarks.containment"]
        subprocess.run(["unshare", "--mount", "sh", "-c", command, "sh", *again], check=False)


if __name__ == "__main__":
    main()
