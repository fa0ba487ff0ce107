"""Requests for pictures, a replica that makes them, and pictures as a client sees them."""

from __future__ import annotations

import base64
import io
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stopbath.lifecycle import Deadline
from stopbath.messages import GenerationRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stopbath.executor.multiproc import MultiprocExecutor

__all__ = ["Unwatched", "differ", "pictures_of", "up", "wanted"]


def wanted(**more: Any) -> GenerationRequest:
    """Give a small request, four steps with guidance unless told otherwise."""
    plain: dict[str, Any] = {
        "id": "r",
        "prompt": "a red seven",
        "width": 32,
        "height": 32,
        "seed": 7,
        "num_inference_steps": 4,
        "guidance_scale": 3.0,
    }
    return GenerationRequest(**{**plain, **more})


class Unwatched:
    """Nobody waits for the call."""

    call_id = 0
    cancelled = False

    def progress(self, step: int, steps: int) -> None:
        """Hear nothing."""


@contextmanager
def up(
    replica: MultiprocExecutor, start_s: float, stop_s: float = 60.0
) -> Iterator[MultiprocExecutor]:
    """Have a replica ready inside the block, and stopped after it."""
    replica.start()
    try:
        replica.wait_ready(Deadline.after(start_s))
        yield replica
    finally:
        replica.shutdown(Deadline.after(stop_s))


def pictures_of(outcome: Any) -> list[Any]:
    """Read a rank's outcome: one (H, W, 3) array of int per picture."""
    import numpy as np
    from PIL import Image

    assert outcome.ok, outcome.traceback
    files = [io.BytesIO(base64.b64decode(file)) for file in outcome.value["images_b64"]]
    return [np.array(Image.open(file)).astype(int) for file in files]


def differ(one: Any, other: Any) -> int:
    """Give the largest difference of two pictures, of 255."""
    return int(abs(one - other).max())
