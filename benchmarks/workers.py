"""Worker functions for the benches."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stopbath.lifecycle import WorkerContext


def cooperative(ctx: WorkerContext) -> None:
    """Leave when asked."""
    ctx.ready()
    ctx.wait_stop()


def deaf(ctx: WorkerContext) -> None:
    """Ignore every polite request."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctx.ready()
    while True:
        signal.pause()


def with_holder(ctx: WorkerContext) -> None:
    """Leave a forked child that holds every descriptor when this worker is killed."""
    pid = os.fork()
    if pid == 0:
        time.sleep(3600)
    ctx.ready({"holder": pid})
    ctx.wait_stop()
