"""The ten named colours, which pairs are legible, and reading colours back from pictures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor

COLOURS: Final[dict[str, tuple[float, float, float]]] = {
    "black": (0.0, 0.0, 0.0),
    "white": (1.0, 1.0, 1.0),
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.65, 0.2),
    "blue": (0.1, 0.2, 0.9),
    "yellow": (0.98, 0.9, 0.1),
    "orange": (1.0, 0.55, 0.0),
    "purple": (0.5, 0.1, 0.65),
    "pink": (1.0, 0.6, 0.75),
    "cyan": (0.1, 0.8, 0.9),
}
NAMES: Final = tuple(COLOURS)
RGB: Final = torch.tensor(list(COLOURS.values()))
"""(10, 3), in 0..1, in the order of `NAMES`."""

MIN_CONTRAST: Final = 0.6
"""Squared RGB distance below which a digit is hard to read: such pairs are not trained."""

BORDER_PX: Final = 2
INK_SHARE: Final = 0.04
"""The share of pixels surely inside the stroke: a thin one covers about twice as much."""


def contrast(foreground: Tensor, background: Tensor) -> Tensor:
    """Squared RGB distance of two (..., 3) colours in 0..1, shape (...)."""
    return (foreground - background).square().sum(-1)


@cache
def legible_pairs() -> tuple[tuple[str, str], ...]:
    """Every ordered (foreground, background) pair with at least `MIN_CONTRAST`."""
    return tuple(
        (foreground, background)
        for i, foreground in enumerate(NAMES)
        for j, background in enumerate(NAMES)
        if contrast(RGB[i], RGB[j]) >= MIN_CONTRAST
    )


def pairs_rgb() -> tuple[Tensor, Tensor]:
    """Return foregrounds and backgrounds of `legible_pairs`, each (pairs, 3)."""
    foregrounds, backgrounds = zip(*legible_pairs(), strict=True)
    return (
        RGB[[NAMES.index(name) for name in foregrounds]],
        RGB[[NAMES.index(name) for name in backgrounds]],
    )


def default_background(foreground: str) -> str:
    """Return the background of a prompt that names only the digit's colour: black where legible."""
    return "black" if (foreground, "black") in legible_pairs() else "white"


def default_foreground(background: str) -> str:
    """Return the digit's colour of a prompt that names only the background: white if legible."""
    return "white" if ("white", background) in legible_pairs() else "black"


@dataclass(frozen=True)
class Reading:
    """What a batch of pictures shows: colour indices into `NAMES` and the stroke's intensity."""

    foreground: Tensor
    """(batch,) index of the nearest named colour."""
    background: Tensor
    """(batch,) index of the nearest named colour."""
    ink: Tensor
    """(batch, 1, height, width), 0 on the background and 1 inside the stroke."""


def read(pictures: Tensor) -> Reading:
    """Read (batch, 3, height, width) pictures in 0..1 without knowing what they should show.

    The background is the median of the border, the foreground the mean of the pixels
    farthest from it, and the ink each pixel's place on the line between the two.
    """
    batch = pictures.shape[0]
    border = torch.cat(
        [
            pictures[:, :, :BORDER_PX].flatten(2),
            pictures[:, :, -BORDER_PX:].flatten(2),
            pictures[:, :, :, :BORDER_PX].flatten(2),
            pictures[:, :, :, -BORDER_PX:].flatten(2),
        ],
        dim=2,
    )
    background = border.median(dim=2).values
    pixels = pictures.flatten(2)
    away = (pixels - background[:, :, None]).square().sum(1)
    count = max(1, round(INK_SHARE * away.shape[1]))
    farthest = away.topk(count, dim=1).indices
    chosen = farthest[:, None].expand(-1, 3, -1)
    foreground = pixels.gather(2, chosen).mean(2)
    axis = foreground - background
    length = axis.square().sum(1, keepdim=True).clamp_min(1e-4)
    along = ((pixels - background[:, :, None]) * axis[:, :, None]).sum(1) / length
    ink = along.clamp(0, 1).view(batch, 1, *pictures.shape[2:])
    return Reading(foreground=_nearest(foreground), background=_nearest(background), ink=ink)


def _nearest(colours: Tensor) -> Tensor:
    return (colours[:, None] - RGB[None]).square().sum(-1).argmin(1)
