"""A worker extension: adds a method that tells what it was given."""

from __future__ import annotations

from typing import Any


def extend(rank: Any) -> None:
    """Add `whoami` to the methods of a rank."""
    said = [rank.ctx.name, type(rank.pipeline.pipe).__name__, rank.device]
    rank.methods["whoami"] = lambda _params, _watch: said


def fail_on_rank_1(rank: Any) -> None:
    """Have rank 1's next step run out of memory once the method "arm" was called."""
    block = rank.pipeline.pipe.transformer.transformer_blocks[-1]
    whole = block.forward
    armed: list[bool] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        if armed:
            armed.clear()
            raise MemoryError("no memory left")
        return whole(*args, **kwargs)

    def arm(_params: Any, _watch: Any) -> None:
        if rank.rank == 1:
            armed.append(True)

    block.forward = forward
    rank.methods["arm"] = arm
