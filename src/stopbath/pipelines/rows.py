"""The same bits for a row of a batch, whatever rows are computed with it.

A matrix product on the CPU computes its rows in fours and rounds the last few, when they are
fewer, in another order. So a layer that sees one row per picture (time, pooled text, modulation)
gives a picture other bits alone than in company. Here those layers always see a multiple of four
rows, and the model a multiple of two; both measured, on x86-64 with torch 2.13. Padding only
those layers costs next to nothing, where padding the batch to four would double the work of a
single request. On an accelerator nothing of the kind is promised, and nothing is padded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["LAYER_ROWS", "MODEL_ROWS", "padded", "steady"]

LAYER_ROWS: Final = 4
MODEL_ROWS: Final = 2


def padded(tensor: Tensor, multiple: int) -> Tensor:
    """Repeat the last row until the rows are a multiple of `multiple`."""
    missing = -len(tensor) % multiple
    return (
        torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])]) if missing else tensor
    )


def steady(model: Any, call: Callable[[], object]) -> int:
    """Pad the layers of `model` that see one row per picture; give how many they are.

    `call` has to run the model with fewer than four rows.
    """
    found: set[Any] = set()

    def look(layer: Any, args: tuple[Tensor, ...]) -> None:
        if args and _rows(args[0]) < LAYER_ROWS:
            found.add(layer)

    linears = [module for module in model.modules() if type(module) is nn.Linear]
    hooks = [linear.register_forward_pre_hook(look) for linear in linears]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    for linear in found:
        linear.forward = _steady_forward(linear)
    return len(found)


def _rows(tensor: Tensor) -> int:
    return int(tensor.shape[:-1].numel())


def _steady_forward(linear: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        rows = _rows(x)
        missing = -rows % LAYER_ROWS
        if not missing:
            return functional.linear(x, linear.weight, linear.bias)
        flat = functional.pad(x.reshape(rows, -1), (0, 0, 0, missing))
        out = functional.linear(flat, linear.weight, linear.bias)[:rows]
        return out.reshape(*x.shape[:-1], -1)

    return forward
