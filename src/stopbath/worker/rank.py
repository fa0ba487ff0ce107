"""A rank with its model: what an extension is given, and the methods every rank has."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from stopbath.messages import GENERATE, PING, GenerationRequest, GenerationResult
from stopbath.pipelines.diffusers import DiffusersPipeline
from stopbath.pipelines.joint import Peers
from stopbath.worker.pictures import encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from PIL.Image import Image

    from stopbath.config import ServeConfig
    from stopbath.lifecycle import WorkerContext
    from stopbath.pipelines.step import BatchedPipeline
    from stopbath.worker.loop import CallWatch

__all__ = ["Rank", "result_of"]


def result_of(request: GenerationRequest, images: list[Image], began_s: float) -> dict[str, Any]:
    """Give the answer to a request: a `GenerationResult` as a frame holds it."""
    result = GenerationResult(
        id=request.id,
        images_b64=[
            encode(image, request.output_format, request.output_compression) for image in images
        ],
        seconds=time.monotonic() - began_s,
    )
    return msgspec.structs.asdict(result)


class Rank:
    """One rank of a replica, the model loaded.

    An extension (`--worker-extension MODULE:FUNCTION`) is called with this object before the rank
    reports ready; it may replace or add `methods` (called as `method(params, watch)`) and touch
    `pipeline.pipe`, the diffusers pipeline. In step mode there is no method `GENERATE` unless an
    extension adds one: such calls go to the batch.
    """

    def __init__(
        self,
        ctx: WorkerContext,
        config: ServeConfig,
        *,
        rank: int,
        world_size: int,
        device: str,
        pipeline: DiffusersPipeline | BatchedPipeline,
    ) -> None:
        self.ctx = ctx
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.pipeline = pipeline
        self.peers = Peers(rank, world_size, device) if world_size > 1 else None
        self.methods: dict[str, Callable[[Any, CallWatch], Any]] = {PING: self.ping}
        if isinstance(pipeline, DiffusersPipeline):
            self.methods[GENERATE] = partial(self.generate, pipeline)

    def generate(
        self, pipeline: DiffusersPipeline, params: Any, watch: CallWatch
    ) -> dict[str, Any] | None:
        """Make the pictures of a `GenerationRequest`; a `GenerationResult` from rank 0 only."""
        began_s = time.monotonic()
        request = msgspec.convert(params, GenerationRequest)
        images = pipeline.generate(request, watch)
        return None if self.rank != 0 else result_of(request, images, began_s)

    def ping(self, params: Any, _watch: CallWatch) -> Any:
        """Give back the params."""
        return params

    def after_failure(self) -> None:
        """Give back what a failed call (out of memory, most often) holds on the device."""
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()
