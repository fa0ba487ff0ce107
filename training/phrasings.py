"""Prompts to judge the model by, in classes; the unseen ones use words it was not trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from training.captions import WORDS
from training.colours import default_background, default_foreground, legible_pairs

if TYPE_CHECKING:
    from collections.abc import Sequence

PLAIN_WORD: Final = ("{w}", "a {w}", "the digit {w}", "a handwritten {w}", "please draw a {w}")
NUMERAL: Final = ("{n}", "a {n}", "the number {n}", "draw me the digit {n}", "show me a {n}")
COLOURED: Final = (
    "a {f} {w} on {b}",
    "{f} {n} on a {b} background",
    "{w} in {f} on {b}",
    "a {b} wall with a {f} {w}",
    "on {b} paper, the digit {n} in {f} ink",
    "a {f} {w}",
    "{n} on {b}",
)
UNSEEN: Final = (
    "I would love to receive a {w} from grandma",
    "Behold: the majestic {w}!",
    "scribble {n} during lunch",
    "My lucky number is {w}",
    "kindly illustrate a {w} resembling MNIST",
    "the integer {n}, carefully inscribed",
    "What might the numeral {n} resemble?",
    "gimme {w} pronto",
)
UNSEEN_COLOURED: Final = (
    "a gorgeous {f} {w} atop a {b} backdrop",
    "kindly scribble a {f} {n} on something {b}",
    "poster design: {b} background, {f} {w}, minimalist",
    "{w} in {f} lipstick on a {b} mirror",
    "my grandma painted a {f} {n} on her {b} fence",
    "an enormous {f} {w} against {b} scenery",
)
CLASSES: Final[dict[str, tuple[str, ...]]] = {
    "plain word": PLAIN_WORD,
    "numeral": NUMERAL,
    "coloured": COLOURED,
    "unseen": UNSEEN,
    "unseen coloured": UNSEEN_COLOURED,
}


@dataclass(frozen=True)
class Prompt:
    """A prompt and what its picture must show."""

    text: str
    digit: int
    foreground: str
    background: str


def write(phrasing: str, digit: int, foreground: str, background: str) -> Prompt:
    """Fill in one phrasing; a colour that it does not name becomes the default one."""
    if "{b}" not in phrasing:
        foreground = foreground if "{f}" in phrasing else "white"
        background = default_background(foreground)
    elif "{f}" not in phrasing:
        foreground = default_foreground(background)
    text = phrasing.format(w=WORDS[digit], n=digit, f=foreground, b=background)
    return Prompt(text, digit, foreground, background)


def prompts(phrasings: Sequence[str], count: int) -> list[Prompt]:
    """Write ``count`` prompts that go through all digits, phrasings and legible colour pairs."""
    pairs = legible_pairs()
    # A stride that is odd for both tens and pairs: each digit meets many colours.
    return [
        write(phrasings[i // 10 % len(phrasings)], i % 10, *pairs[(7 * i + i // 10) % len(pairs)])
        for i in range(count)
    ]
