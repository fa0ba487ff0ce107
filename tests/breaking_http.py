"""A server process whose HTTP layer breaks on command."""

from __future__ import annotations

import asyncio
import signal
from typing import Any


def server(ctx: Any, config: dict[str, Any]) -> None:
    """Be the server process, with an HTTP layer that raises when it gets SIGUSR1."""
    from stopbath.server import main, serving

    async def break_down(self: Any) -> None:  # noqa: ARG001  (uvicorn's own signature)
        broken = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, broken.set)
        await broken.wait()
        raise RuntimeError("the listener is gone")

    serving._Uvicorn.main_loop = break_down  # type: ignore[method-assign]
    raise SystemExit(main.run(ctx, config, main.multiproc("fake_ranks:main")))
