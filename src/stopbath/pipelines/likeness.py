"""Whether a model makes the same in parts as whole, but for rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from stopbath.pipelines.base import ModelUnusable

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check_close", "far_apart"]

# How far the parts may be from the whole, relative to its largest value: matrix products of
# different sizes round differently.
_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}


def far_apart(whole: Tensor, other: Tensor) -> float | None:
    """Give the largest difference of two tensors of one shape, where it is more than rounding."""
    apart: float = (other.float() - whole.float()).abs().max().item()
    allowed = _TOLERANCE.get(whole.dtype, 1e-1) * max(whole.float().abs().max().item(), 1e-6)
    return None if apart <= allowed else apart  # NaN must not pass


def check_close(name: str, alone: Tensor, together: Tensor, instead: str) -> None:
    """Refuse a model that makes something else together than alone.

    Raises:
        ModelUnusable: the difference is more than rounding.
    """
    if alone.shape != together.shape:
        raise ModelUnusable(f"{name} gives another shape when it is split; {instead}")
    apart = far_apart(alone, together)
    if apart is not None:
        raise ModelUnusable(f"{name} differs by {apart:.3g} when it is split; {instead}")
