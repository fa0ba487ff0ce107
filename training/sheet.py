"""The contact sheet: a row per digit, a column per phrasing, each picture above its prompt."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from PIL import Image, ImageDraw, ImageFont

from training.phrasings import Prompt, write

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

COLUMNS: Final[tuple[tuple[str, str, str], ...]] = (
    ("{w}", "white", "black"),
    ("{n}", "white", "black"),
    ("a red {w} on blue", "red", "blue"),
    ("{n} in yellow on purple", "yellow", "purple"),
    ("a black {w}", "black", "white"),
    ("green wall with a white {w}", "white", "green"),
    ("Could you draw me the numeral {n}?", "white", "black"),
    ("gimme {w} in blue, orange backdrop", "blue", "orange"),
)
ZOOM: Final = 3
GAP_PX: Final = 12
LINE_PX: Final = 12
LINES: Final = 2
FONT_PX: Final = 10
LINE_LETTERS: Final = 20
PAPER: Final = (250, 250, 247)
TEXT: Final = (60, 60, 60)


def prompts() -> list[Prompt]:
    """The prompts of the sheet, row by row."""
    return [
        Prompt(write(phrasing, digit, *colours).text, digit, *colours)
        for digit in range(10)
        for phrasing, *colours in COLUMNS
    ]


def save(pictures: Tensor, asked: Sequence[Prompt], file: Path) -> None:
    """Save (len(asked), 3, height, width) pictures in 0..1 with their prompts as a PNG."""
    side = pictures.shape[-1] * ZOOM
    across, down = side + GAP_PX, side + LINES * LINE_PX + GAP_PX
    rows = -(-len(asked) // len(COLUMNS))
    page = Image.new("RGB", (len(COLUMNS) * across + GAP_PX, rows * down + GAP_PX), PAPER)
    pen = ImageDraw.Draw(page)
    font = ImageFont.load_default(FONT_PX)
    values = (pictures * 255).round().byte().permute(0, 2, 3, 1).numpy()
    for i, (pixels, prompt) in enumerate(zip(values, asked, strict=True)):
        left = GAP_PX + i % len(COLUMNS) * across
        top = GAP_PX + i // len(COLUMNS) * down
        picture = Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST)
        page.paste(picture, (left, top))
        for number, line in enumerate(textwrap.wrap(prompt.text, LINE_LETTERS)[:LINES]):
            pen.text((left, top + side + 2 + number * LINE_PX), line, TEXT, font)
    file.parent.mkdir(parents=True, exist_ok=True)
    page.save(file, optimize=True)
