"""The same bits for a row of a batch, whatever rows are computed with it.

A matrix product on the CPU rounds its rows in another order when they are few: by the kernel that
the library picks for so many rows, so many columns and this processor. Measured with torch 2.13:
on one machine fewer than four rows, or a remainder of a division by four; on another (AVX-512)
fewer than two to sixteen, the more the longer a row. So a layer that sees one row per picture
(time, pooled text, modulation) gives a picture other bits alone than in company. Here each of
them sees a multiple of as many rows as were found, when the model was loaded, to be enough for
it; and the model sees a multiple of two pictures, a text encoder one of four texts. Padding only
those layers costs next to nothing, where padding the batch would multiply the work of a single
request. For a layer where no number of rows is enough (long rows on several threads), and on an
accelerator, nothing is promised and nothing is padded.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

__all__ = ["MODEL_ROWS", "TEXT_ROWS", "padded", "rows_enough", "steady"]

MODEL_ROWS: Final = 2
TEXT_ROWS: Final = 4
_TRIED: Final = (4, 8, 16, 32)
_SEEN: Final = (*range(4, 64, 4), 64, 96, 128, 192)  # how many rows are looked at, of so many:
_MOST: Final = 256


def padded(tensor: Tensor, multiple: int) -> Tensor:
    """Repeat the last row until the rows are a multiple of `multiple`."""
    missing = -len(tensor) % multiple
    return (
        torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])]) if missing else tensor
    )


@torch.no_grad()  # type: ignore[untyped-decorator]  # mypy does not follow torch
def rows_enough(linear: Any) -> int:
    """Measure of how many rows there must be a multiple for each to have its own bits.

    0 when no number that was tried is enough.
    """
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(_MOST, linear.in_features, generator=chance).to(linear.weight.dtype)
    forward = partial(functional.linear, weight=linear.weight, bias=linear.bias)
    whole = forward(x)
    for rows in _TRIED:
        counts = (count for count in _SEEN if count % rows == 0)
        if all(torch.equal(forward(x[:count]), whole[:count]) for count in counts):
            return rows
    return 0


def steady(models: Iterable[Any], call: Callable[[], object]) -> None:
    """Pad the layers of `models` that see too few rows.

    `call` has to run the models for as few rows as there can be.
    """
    fewest: dict[Any, int] = {}

    def look(layer: Any, args: tuple[Tensor, ...]) -> None:
        if args:
            fewest[layer] = min(_rows(args[0]), fewest.get(layer, _MOST))

    linears = [it for model in models for it in model.modules() if type(it) is nn.Linear]
    hooks = [linear.register_forward_pre_hook(look) for linear in linears]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    measured: dict[tuple[int, int, bool], int] = {}
    for linear, rows in fewest.items():
        if rows >= _TRIED[-1]:
            continue
        shape = (linear.in_features, linear.out_features, linear.bias is None)
        if shape not in measured:
            measured[shape] = rows_enough(linear)
        if rows < measured[shape]:
            linear.forward = _steady_forward(linear, measured[shape])


def _rows(tensor: Tensor) -> int:
    return int(tensor.shape[:-1].numel())


def _steady_forward(linear: Any, multiple: int) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        rows = _rows(x)
        missing = -rows % multiple
        if not missing:
            return functional.linear(x, linear.weight, linear.bias)
        flat = functional.pad(x.reshape(rows, -1), (0, 0, 0, missing))
        out = functional.linear(flat, linear.weight, linear.bias)[:rows]
        return out.reshape(*x.shape[:-1], -1)

    return forward
