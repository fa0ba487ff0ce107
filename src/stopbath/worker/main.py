"""Where a rank begins; named "stopbath.worker.main:main" by whoever starts it."""

from __future__ import annotations

import atexit
import importlib
import os
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from stopbath.config import ServeConfig
from stopbath.lifecycle import StartRefused
from stopbath.worker.loop import RankLoop

if TYPE_CHECKING:
    from stopbath.lifecycle import WorkerContext
    from stopbath.worker.rank import Rank

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
    served = _load(ctx, told, rank, world_size, rendezvous)
    loop = _loop(data, served)
    ctx.on_stop(lambda _notice: loop.stop())
    ctx.ready(info=msgspec.to_builtins(served.pipeline.info))
    why = loop.serve()
    if why is not None and not ctx.stopping.is_set():
        raise RuntimeError(why)
    if told.executor == "multiproc":
        _leave()


def _loop(data: socket.socket, served: Rank) -> RankLoop:
    from stopbath.pipelines.step import BatchedPipeline
    from stopbath.worker.batch import BatchLoop
    from stopbath.worker.joint import JointBatchLoop
    from stopbath.worker.tensors import pack, tensor_of

    how: dict[str, Any] = {
        "first": served.rank == 0,
        "step_budget_s": served.config.step_budget_s,
        "pack": pack,
        "unpack": tensor_of,
        "after_failure": served.after_failure,
    }
    if isinstance(served.pipeline, BatchedPipeline):
        rest = served.methods, served.pipeline, served.config.max_batch
        if served.peers is not None:
            return JointBatchLoop(data, *rest, peers=served.peers, **how)
        return BatchLoop(data, *rest, **how)
    return RankLoop(data, served.methods, **how)


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


def _load(
    ctx: WorkerContext, config: ServeConfig, rank: int, world_size: int, rendezvous: str
) -> Rank:
    ctx.progress("importing torch")
    from stopbath.pipelines.diffusers import DiffusersPipeline
    from stopbath.pipelines.split import split_of
    from stopbath.pipelines.step import BatchedPipeline
    from stopbath.worker.rank import Rank
    from stopbath.worker.ranks import device_of, join, share_cores

    share_cores(world_size * config.replicas)
    place = config.replica * world_size + rank
    device = device_of(config.device, place, world_size * config.replicas)
    if world_size > 1:
        ctx.progress(f"joining {world_size} ranks")
        join(ctx.fds[rendezvous], rank, world_size, device, config.request_s)
    ctx.progress("loading model")
    kind = BatchedPipeline if config.mode == "step" else DiffusersPipeline
    pipeline = kind.load(config.model, device)
    served = Rank(ctx, config, rank=rank, world_size=world_size, device=device, pipeline=pipeline)
    if config.worker_extension:
        ctx.progress(f"running {config.worker_extension}")
        _extend(config.worker_extension, served)
    if config.compile:
        pipeline.compile()
    ctx.progress("compiling" if config.compile else "warming up")
    if served.peers is not None:
        pipeline.share(split_of(config.parallel, config.mode, pipeline.pipe, served.peers))
    pipeline.warm_up()
    return served


def _extend(extension: str, served: Rank) -> None:
    module, _, name = extension.partition(":")
    if not (module and name):
        raise StartRefused(f"--worker-extension must be MODULE:FUNCTION, not {extension!r}")
    getattr(importlib.import_module(module), name)(served)
