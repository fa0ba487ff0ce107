"""An executor that starts its own ranks with multiprocessing, as vLLM-Omni's does.

The part between the two lines replaces its cleaner, its monitor and its failure callbacks.
Run it, kill a rank, send SIGINT: `python examples/executor_like_vllm_omni.py`.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from typing import Any

from stopbath.lifecycle import Cause, Deadline, Escalation, Existing, ShutdownReport, adopt


def rank_main(requests: Any) -> None:
    """Be a rank: SIGINT is the parent's business, a None on the queue ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while requests.get() is not None:
        pass


class Executor:
    """K ranks; `is_failed` and `wait` as an engine would use them."""

    def __init__(self, ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.queues = [context.Queue() for _ in range(ranks)]
        self.processes = [
            context.Process(target=rank_main, args=(queue,), name=f"rank{i}")
            for i, queue in enumerate(self.queues)
        ]
        for process in self.processes:
            process.start()
        self.failed = threading.Event()
        # ------------------------------------------------------------------ from here
        self.group = adopt(
            [
                Existing(process, ask=lambda _, queue=queue: queue.put_nowait(None))
                for process, queue in zip(self.processes, self.queues, strict=True)
            ],
            name="executor",
            escalation=Escalation(drain_s=15, terminate_s=5, kill_s=5),
        )
        self.group.on_failure(self.on_rank_death)

    def on_rank_death(self, cause: Cause) -> None:
        """Fail the pending requests with the cause, at once."""
        print(f"failed: {cause}", flush=True)
        self.failed.set()

    def shutdown(self) -> ShutdownReport:
        """Stop every rank; idempotent, bounded, survivors named and kept."""
        return self.group.shutdown(Deadline.after(25))
        # ------------------------------------------------------------------ to here


if __name__ == "__main__":
    executor = Executor(2)
    print("ready", *(process.pid for process in executor.processes), flush=True)
    try:
        executor.failed.wait()
    except KeyboardInterrupt:
        pass
    finally:
        print(executor.shutdown(), flush=True)
