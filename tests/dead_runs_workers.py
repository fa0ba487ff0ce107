"""Workers that start something which does not end with them by itself."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stopbath.lifecycle import WorkerContext


def with_helper(ctx: WorkerContext) -> None:
    """Start a helper in a session of its own; `info` is its pid."""
    helper = subprocess.Popen(["sleep", "300"], start_new_session=True)
    ctx.ready(helper.pid)
    ctx.wait_stop()
