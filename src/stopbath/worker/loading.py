"""How a rank gets its model and its loop: all that takes long to import, in one place.

`executor/_preload.py` names this module, so that a zygote has imported it for every rank.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stopbath.lifecycle import StartRefused
from stopbath.pipelines.diffusers import DiffusersPipeline
from stopbath.pipelines.split import split_of
from stopbath.pipelines.step import BatchedPipeline
from stopbath.worker.batch import BatchLoop
from stopbath.worker.joint import JointBatchLoop
from stopbath.worker.loop import RankLoop
from stopbath.worker.rank import Rank
from stopbath.worker.ranks import device_of, join, share_cores
from stopbath.worker.tensors import pack, tensor_of

if TYPE_CHECKING:
    import socket

    from stopbath.config import ServeConfig
    from stopbath.lifecycle import WorkerContext

__all__ = ["load", "loop_of"]


def load(
    ctx: WorkerContext, config: ServeConfig, rank: int, world_size: int, rendezvous: str
) -> Rank:
    """Find a place among the ranks, load the model, warm it up.

    Raises:
        ModelUnusable: the model cannot be served; one line says why.
    """
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


def loop_of(data: socket.socket, served: Rank) -> RankLoop:
    """Give the loop that answers calls for a rank."""
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
