"""What a user may type for a digit, as a seeded grammar."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from training.colours import NAMES, default_background, default_foreground, legible_pairs

if TYPE_CHECKING:
    from random import Random

WORDS: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

LEADS: Final = (
    "a picture of", "an image of", "a photo of", "a drawing of", "a sketch of", "a painting of",
    "draw", "draw me", "please draw", "can you draw", "could you draw me", "would you draw",
    "show me", "please show me", "show", "give me", "paint", "paint me", "write", "please write",
    "write down", "make", "make me", "generate", "create", "render", "sketch", "i want",
    "i want to see", "i would like", "i would like to see", "i'd like", "let me see", "i need",
    "how about", "it is", "this is", "here is", "we want", "do you have", "what about",
)  # fmt: skip
NOUNS: Final = (
    "{d}", "a {d}", "the {d}", "an {d}", "digit {d}", "the digit {d}", "a digit {d}",
    "number {d}", "the number {d}", "a number {d}", "numeral {d}", "the numeral {d}",
    "figure {d}", "the figure {d}", "a handwritten {d}", "handwritten {d}", "the value {d}",
    "the handwritten digit {d}", "a big {d}", "my {d}", "some {d}", "the symbol {d}",
)  # fmt: skip
SURFACES: Final = (
    "background", "backdrop", "paper", "card", "wall", "canvas", "board", "sheet", "page",
    "ground", "screen", "field", "surface", "cloth",
)  # fmt: skip
MEDIA: Final = ("ink", "paint", "chalk", "pencil", "crayon", "marker", "pen", "colour", "color")
ON: Final = (
    "on {b}", "on a {b} {s}", "on {b} {s}", "over {b}", "over a {b} {s}", "against {b}",
    "against a {b} {s}", "with a {b} {s}", "with {b} {s}", ", {b} {s}", "upon a {b} {s}",
    "on the {b} {s}", "in front of a {b} {s}", ", {s} {b}", "and a {b} {s}",
)  # fmt: skip
INKED: Final = (
    "{d} in {f}", "{d} in {f} {m}", "{d} written in {f}", "{d} written in {f} {m}",
    "{d} with {f} {m}", "{d} with a {f} {m}", "{d} painted {f}", "{d} using {f} {m}",
    "{d} coloured {f}", "{d} , {f}", "{d} drawn in {f}", "{d} that is {f}",
)  # fmt: skip
SURFACE_FIRST: Final = (
    "on {b} ,", "on a {b} {s} ,", "a {b} {s} with", "{b} {s} with", "{b} {s} ,", "{b} {s} :",
    "on a {b} {s}", "take a {b} {s} and draw", "on the {b} {s} put", "a {b} {s} and",
    "a {b} {s} showing", "{b} :",
)  # fmt: skip
FILLERS: Final = tuple(
    """
    about above after again all also always and any are around as at away back be beautiful
    because been before best better between bold book both bright but by call cat centre
    center child children clean clear close computer cute dark day dear detailed did different
    do does dog done each early easy elegant end enough even ever every example exactly fancy
    fast favourite favorite feel few fine first for friend from fun funny gentle get go going
    good great had hand happy has have he hello help her hey hi high him his home hope house
    if in into is it its just keep kind know last late left letter life light like line little
    long look looks lovely low made many may maybe me mean middle might mind minimal modern
    more most much must my name neat need never new next nice no not now of off often old only
    or other our out own part people perfect person place plain plan play please point pretty
    put question quick quickly quite rather ready real really right room rough round same say
    school see shape she short should side simple single sir size slow small smile so soft
    some someone something soon special spell start still stroke strong style such sure table
    tall tell than thank thanks that their them then there these they thick thin thing think
    those time tiny to today together told too try turn under up us use usual very wait want
    was way we well were what when where which while who whole why wide will wish with word
    work world would write writing year yes you young your
    """.split()  # noqa: SIM905 - three hundred quoted words would hide the rest
)

EMPTY_SHARE: Final = 0.10
"""Captions without a word: the unconditional half of classifier-free guidance."""
NUMERAL_SHARE: Final = 0.4
COLOURED_SHARE: Final = 0.75
FILLER_SHARE: Final = 0.5
UNKNOWN_SHARE: Final = 0.3
PSEUDO_SHARE: Final = 0.25
MAX_FILLERS: Final = 6
SCATTERED_SHARE: Final = 0.25
LETTERS: Final = "aaabccddeeeeffgghhiiijkllmmnnooopprrssttuuvwxyz"


@dataclass(frozen=True)
class Scene:
    """What a picture shows and how a user asked for it."""

    digit: int
    foreground: str
    background: str
    caption: str


class CaptionWriter:
    """Draws scenes and captions from one seeded source of chance."""

    def __init__(self, random: Random) -> None:
        """Take over ``random``; equal states write equal captions."""
        self._random = random
        self._pairs = legible_pairs()

    def colours(self) -> tuple[str, str]:
        """Draw a legible (foreground, background) pair, one in six of them white on black."""
        if self._random.random() < 1 / 6:
            return "white", "black"
        return self._random.choice(self._pairs)

    def caption(
        self, digit: int, foreground: str, background: str, *, fillers: bool, exacting: bool = False
    ) -> str:
        """Write a caption for a picture; only colours that are no defaults must be named.

        ``exacting`` captions put words nobody knows in the place of surfaces and media, and never
        leave out both colours of black on white, which other captions may, like white on black.
        """
        chance = self._random
        if chance.random() < EMPTY_SHARE:
            return ""
        text = self._content(digit, foreground, background, exacting=exacting)
        if fillers and chance.random() < FILLER_SHARE:
            text = self._with_fillers(text)
        if chance.random() < 0.2:
            text += chance.choice((".", "!", "?", " please", " , please", " , thank you", " !!"))
        return re.sub(r" +([,:])", r"\1", text)

    def _content(self, digit: int, foreground: str, background: str, *, exacting: bool) -> str:
        chance = self._random
        number = str(digit) if chance.random() < NUMERAL_SHARE else WORDS[digit]
        noun = chance.choice(NOUNS) if chance.random() < 0.8 else "{d}"
        name_background = background != default_background(foreground) or chance.random() < 0.3
        name_foreground = foreground != default_foreground(background) or chance.random() < 0.3
        if exacting and foreground != "white" and not name_background:
            name_foreground = True
        if name_foreground:
            if chance.random() < 0.65:
                noun = noun.replace(
                    "{d}", chance.choice(("{f} {d}", "{f} {d}", "{f} coloured {d}"))
                )
            else:
                noun = noun.replace("{d}", chance.choice(INKED))
        before = f"{chance.choice(LEADS)} " if chance.random() < 0.4 else ""
        text = before + noun
        if name_background:
            if chance.random() < 0.7:
                text = f"{text} {chance.choice(ON)}"
            else:
                text = f"{chance.choice(SURFACE_FIRST)} {text}"
        surface = chance.choice(SURFACES) if chance.random() < 0.6 else SURFACES[0]
        medium = chance.choice(MEDIA)
        if exacting and chance.random() < UNKNOWN_SHARE:
            surface, medium = self._filler(), self._filler()
        return text.format(d=number, f=foreground, b=background, s=surface, m=medium)

    def _with_fillers(self, text: str) -> str:
        chance = self._random
        words = [self._filler() for _ in range(chance.randint(1, MAX_FILLERS))]
        if chance.random() < SCATTERED_SHARE:
            scattered = text.split()
            for word in words[:3]:
                scattered.insert(chance.randint(0, len(scattered)), word)
            return " ".join(scattered)
        split = chance.choice((0, len(words), chance.randint(0, len(words))))
        comma = chance.choice(("", "", ","))
        before = " ".join(words[:split])
        after = " ".join(words[split:])
        return f"{before}{comma if before else ''} {text}{comma if after else ''} {after}".strip()

    def _filler(self) -> str:
        """A common word, or one nobody knows: so that unknown words mean nothing."""
        chance = self._random
        if chance.random() < PSEUDO_SHARE:
            return "".join(chance.choice(LETTERS) for _ in range(chance.randint(2, 9)))
        return chance.choice(FILLERS)


def known_words() -> list[str]:
    """Every word that the grammar can write, sorted; unknown words are spelled in pieces."""
    phrases = (*LEADS, *NOUNS, *SURFACES, *MEDIA, *ON, *INKED, *SURFACE_FIRST, *FILLERS)
    text = re.sub(r"{.}", " ", " ".join(phrases)).lower()
    words = set(re.findall(r"[a-z]+", text)) | set(WORDS) | set(NAMES)
    return sorted(words | {"coloured", "please", "thank", "you"})
