"""Ranks for the benches of the engine: one without a model, and what one with a model adds."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any

from stopbath.messages import ModelInfo
from stopbath.worker.loop import RankLoop

if TYPE_CHECKING:
    from stopbath.lifecycle import WorkerContext
    from stopbath.worker.rank import Rank

PAGE = 4096

INFO = {
    "pipeline": "None",
    "family": "none",
    "width": 8,
    "height": 8,
    "size_multiple": 8,
    "max_width": 8,
    "max_height": 8,
    "num_inference_steps": 1,
    "guidance_scale": 1.0,
    "max_prompt_tokens": 1,
    "device": "cpu",
}
assert set(INFO) == set(ModelInfo.__struct_fields__)


def main(
    ctx: WorkerContext, _config: dict[str, Any], rank: int, _world_size: int, _rendezvous: str
) -> None:
    """Answer `echo` and `touch`."""
    methods = {
        "echo": lambda params, _watch: params,
        "touch": lambda params, _watch: touched(params.data),
    }
    loop = RankLoop(socket.socket(fileno=ctx.fds["data"]), methods, first=rank == 0)
    ctx.on_stop(lambda _notice: loop.stop())
    ctx.ready(info=INFO)
    loop.serve()


def touched(data: memoryview) -> int:
    """Read a byte of every page."""
    return len(bytes(data[::PAGE]))


def extend(rank: Rank) -> None:
    """Have the model use one thread, and add two methods.

    `cpu_s`: the main thread's processor time so far. `bare`: the same of one model call, as a
    guided picture of SD3 needs it, over so many.
    """
    import torch

    torch.set_num_threads(1)

    def bare(count: int, _watch: Any) -> float:
        pipe = rank.pipeline.pipe
        model, info = pipe.transformer, rank.pipeline.info
        prompt, negative, pooled, pooled_negative = pipe.encode_prompt(
            "seven", None, None, max_sequence_length=info.max_prompt_tokens
        )
        side = info.width // pipe.vae_scale_factor
        inputs = {
            "hidden_states": torch.randn(2, model.config.in_channels, side, side),
            "timestep": torch.full((2,), 500.0),
            "encoder_hidden_states": torch.cat([negative, prompt]),
            "pooled_projections": torch.cat([pooled_negative, pooled]),
        }
        with torch.no_grad():
            began = time.thread_time()
            for _ in range(count):
                model(**inputs, return_dict=False)
            return (time.thread_time() - began) / count

    rank.methods["bare"] = bare
    rank.methods["cpu_s"] = lambda _params, _watch: time.thread_time()
