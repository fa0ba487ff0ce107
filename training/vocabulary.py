"""Tokenizers built from a word list alone.

`tokenizers.trainers.BpeTrainer` is not used: its ties are broken by hash order, so that it makes
another vocabulary in each process.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from transformers import CLIPTokenizer, T5TokenizerFast

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TEXT_TOKENS: Final = 32
BEGIN: Final = "<|startoftext|>"
END: Final = "<|endoftext|>"
WORD_END: Final = "</w>"


def clip_tokenizer(words: Iterable[str]) -> CLIPTokenizer:
    """Byte-level CLIP tokenizer in which each of ``words`` is one token.

    Anything else is spelled in pieces, down to single bytes, so no text is unknown.
    """
    merges = learn_merges(words)
    letters = byte_letters()
    tokens = [*letters, *(letter + WORD_END for letter in letters)]
    tokens += ["".join(pair) for pair in merges]
    # Two merges may spell the same token; it has one number.
    tokens = [*dict.fromkeys(tokens), BEGIN, END]
    return CLIPTokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=merges,
        model_max_length=TEXT_TOKENS,
    )


def t5_tokenizer() -> T5TokenizerFast:
    """T5 tokenizer without a single word: its encoder is muted, so nothing is lost.

    Each word of a prompt is one unknown token, so that short limits rarely cut anything.
    """
    return T5TokenizerFast(
        vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)],
        extra_ids=0,
        additional_special_tokens=[],
        model_max_length=512,
    )


def learn_merges(words: Iterable[str]) -> list[tuple[str, str]]:
    """Byte-pair merges until each word is whole; most frequent first, ties by alphabet."""
    spelled = [(*word[:-1], word[-1] + WORD_END) for word in sorted(set(words))]
    merges: list[tuple[str, str]] = []
    while True:
        counts = Counter(pair for parts in spelled for pair in pairwise(parts))
        if not counts:
            return merges
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        spelled = [_merged(parts, best) for parts in spelled]


def _merged(parts: Sequence[str], pair: tuple[str, str]) -> tuple[str, ...]:
    joined: list[str] = []
    for part in parts:
        if joined and (joined[-1], part) == pair:
            joined[-1] += part
        else:
            joined.append(part)
    return tuple(joined)


def byte_letters() -> list[str]:
    """The 256 printable letters that stand for bytes in GPT-2's and CLIP's vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + i) for i in range(len(others))]
