"""Steps of the denoiser, eager and through torch.compile, and what the compilation takes."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any

from benchmarks.table import Bench, Row

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BENCHES"]

BATCHES = (1, 4, 16)
STEPS, ROUNDS = 12, 7


def compiled() -> Iterator[Row]:
    """Both in turns, so that both see the same machine; the cache of the compiler is empty."""
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # as the ranks have it
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        from stopbath.config import BUNDLED
        from stopbath.pipelines.step import BatchedPipeline

        eager = BatchedPipeline.load(BUNDLED, "cpu")
        eager.warm_up()
        faster = BatchedPipeline.load(BUNDLED, "cpu")
        began = time.perf_counter()
        faster.compile()
        faster.warm_up()
        took = time.perf_counter() - began
        yield Row("compilation, once, before ready", took, took, "s", "")
        for batch in BATCHES:
            rates: dict[str, list[float]] = {"eager": [], "compiled": []}
            apart = 0.0
            for _ in range(ROUNDS):
                one, its = _run(eager, batch)
                other, theirs = _run(faster, batch)
                rates["eager"].append(one)
                rates["compiled"].append(other)
                apart = max(apart, float((its - theirs).abs().max()))
            for name, several in rates.items():
                what = f"{name}, {batch} picture(s): image-steps"
                yield Row(what, statistics.median(several), min(several), "/s", "")
            pairs = zip(rates["compiled"], rates["eager"], strict=True)
            ratios = [other / one for other, one in pairs]
            yield Row("  compiled / eager", statistics.median(ratios), min(ratios), "", "")
            yield Row("  largest difference of latents", apart, apart, "", "")


def _run(pipeline: Any, batch: int) -> tuple[float, Any]:
    """Give image-steps per second, and the latents of the first picture."""
    from stopbath.messages import GenerationRequest

    samples = pipeline.begin(
        [
            GenerationRequest(
                id=str(i),
                prompt="a red seven on blue",
                width=32,
                height=32,
                seed=i,
                num_inference_steps=STEPS,
                guidance_scale=3.0,
            )
            for i in range(batch)
        ]
    )
    began = time.perf_counter()
    while not samples[0].over:
        pipeline.step(samples)
    return batch * STEPS / (time.perf_counter() - began), samples[0].latents


BENCHES: dict[str, Bench] = {"compiled": compiled}
