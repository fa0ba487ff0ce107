"""A rank with its model: what an extension is given, and the methods every rank has."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from stopbath.messages import GENERATE, PING, GenerationRequest, GenerationResult
from stopbath.worker.pictures import encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopbath.config import ServeConfig
    from stopbath.lifecycle import WorkerContext
    from stopbath.pipelines.diffusers import DiffusersPipeline
    from stopbath.worker.loop import CallWatch

__all__ = ["Rank"]


class Rank:
    """One rank of a replica, the model loaded.

    An extension (`--worker-extension MODULE:FUNCTION`) is called with this object before the rank
    reports ready; it may replace or add `methods` (called as `method(params, watch)`) and touch
    `pipeline.pipe`, the diffusers pipeline.
    """

    def __init__(
        self,
        ctx: WorkerContext,
        config: ServeConfig,
        *,
        rank: int,
        world_size: int,
        device: str,
        pipeline: DiffusersPipeline,
    ) -> None:
        self.ctx = ctx
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.pipeline = pipeline
        self.methods: dict[str, Callable[[Any, CallWatch], Any]] = {
            GENERATE: self.generate,
            PING: self.ping,
        }

    def generate(self, params: Any, watch: CallWatch) -> dict[str, Any] | None:
        """Make the pictures of a `GenerationRequest`; a `GenerationResult` from rank 0 only."""
        began_s = time.monotonic()
        request = msgspec.convert(params, GenerationRequest)
        images = self.pipeline.generate(request, watch)
        if self.rank != 0:
            return None
        result = GenerationResult(
            id=request.id,
            images_b64=[
                encode(image, request.output_format, request.output_compression) for image in images
            ],
            seconds=time.monotonic() - began_s,
        )
        return msgspec.structs.asdict(result)

    def ping(self, params: Any, _watch: CallWatch) -> Any:
        """Give back the params."""
        return params

    def after_failure(self) -> None:
        """Give back what a failed call (out of memory, most often) holds on the device."""
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()
