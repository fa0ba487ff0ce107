"""Where a rank begins; named "stopbath.worker.main:main" by whoever starts it."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from stopbath.config import ServeConfig

if TYPE_CHECKING:
    from stopbath.lifecycle import WorkerContext

__all__ = ["main"]


def main(
    ctx: WorkerContext, config: dict[str, Any], rank: int, world_size: int, rendezvous: str
) -> None:
    """Load the model, report ready, answer calls until told to stop or the server is gone.

    A stop that comes before ready is a SIGTERM, whose default action ends the rank in the middle
    of whatever loads: there is nothing to finish then.

    `config` is `ServeConfig` as builtins. `ctx.fds["data"]` is the data channel; `rendezvous`
    names the descriptor of the memfd at which the ranks meet ("" with one rank).

    Raises:
        ModelUnusable: the model cannot be served; one line says why.
        RuntimeError: the server closed the data channel without a stop.
    """
    told = msgspec.convert(config, ServeConfig)
    data = socket.socket(fileno=ctx.fds["data"])
    ctx.progress("importing torch")
    from stopbath.worker.loading import load, loop_of

    served = load(ctx, told, rank, world_size, rendezvous)
    loop = loop_of(data, served)
    ctx.on_stop(lambda _notice: loop.stop())
    ctx.ready(info=msgspec.to_builtins(served.pipeline.info))
    why = loop.serve()
    if why is not None and not ctx.stopping.is_set():
        raise RuntimeError(why)
    if told.executor == "multiproc":
        _leave()


def _leave() -> NoReturn:
    """End the process now that all is answered, without taking the interpreter apart.

    Freeing the modules of torch and diffusers one by one takes a second of the drain's grace; the
    kernel frees them in milliseconds. Exit functions still run, for an extension's profiler.
    """
    atexit._run_exitfuncs()  # noqa: SLF001  (there is no public way to run them before _exit)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)
