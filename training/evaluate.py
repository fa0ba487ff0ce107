"""Judge a digit model: ``python -m training.evaluate --sheet docs/contact-sheet.png``."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from training import classifier, sheet
from training.colours import NAMES, read
from training.export import size_bytes
from training.phrasings import CLASSES, Prompt, prompts
from training.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT: Final = Path(__file__).resolve().parent.parent
BUNDLED: Final = ROOT / "src" / "stopbath" / "pipelines" / "bundled"
JUDGE: Final = ROOT / "tests" / "data"
BATCH: Final = 50
STEPS: Final = 12
GUIDANCE: Final = 3.0
SEQUENCE: Final = 16


@dataclass(frozen=True)
class Score:
    """Shares of pictures, 0..1, that agree with their prompts."""

    digit: float
    foreground: float
    background: float
    everything: float
    """Digit and both colours at once."""


def load_model(folder: Path) -> DiffusionPipeline:
    """Load a pipeline as any program does, from disk only."""
    pipeline = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(
    pipeline: DiffusionPipeline,
    texts: Sequence[str],
    *,
    seed: int,
    steps: int = STEPS,
    guidance: float = GUIDANCE,
    sequence: int = SEQUENCE,
) -> Tensor:
    """Draw (len(texts), 3, 32, 32) pictures in 0..1."""
    result = pipeline(
        list(texts),
        num_inference_steps=steps,
        guidance_scale=guidance,
        max_sequence_length=sequence,
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
    )
    return torch.as_tensor(result.images)


def draw_all(
    pipeline: DiffusionPipeline,
    asked: Sequence[Prompt],
    *,
    seed: int,
    steps: int = STEPS,
    guidance: float = GUIDANCE,
    sequence: int = SEQUENCE,
) -> Tensor:
    """Draw (len(asked), 3, 32, 32) pictures in 0..1, `BATCH` at a time.

    Each batch has a seed of its own, counted up from ``seed``.
    """
    progress = Progress("drawing", len(asked))
    pictures = []
    for start in range(0, len(asked), BATCH):
        texts = [prompt.text for prompt in asked[start : start + BATCH]]
        pictures.append(
            draw(
                pipeline,
                texts,
                seed=seed + start,
                steps=steps,
                guidance=guidance,
                sequence=sequence,
            )
        )
        progress.step(start + len(texts))
    return torch.cat(pictures)


def score(judge: classifier.DigitClassifier, pictures: Tensor, asked: Sequence[Prompt]) -> Score:
    """Compare (len(asked), 3, 32, 32) pictures in 0..1 with what was asked for."""
    seen = read(pictures)
    with torch.no_grad():
        digits = judge(seen.ink).argmax(1)
    digit = digits == torch.tensor([prompt.digit for prompt in asked])
    foreground = seen.foreground == torch.tensor([NAMES.index(p.foreground) for p in asked])
    background = seen.background == torch.tensor([NAMES.index(p.background) for p in asked])
    return Score(
        digit=_share(digit),
        foreground=_share(foreground),
        background=_share(background),
        everything=_share(digit & foreground & background),
    )


def _share(right: Tensor) -> float:
    return float(right.double().mean())


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the scores of each class and draw the contact sheet; the exit status."""
    options = _options(arguments)
    pipeline = load_model(options.model)
    how = {"seed": options.seed, "guidance": options.guidance, "sequence": options.sequence}
    judge = classifier.load(options.judge)
    unseen = classifier.load_test_digits(options.judge / classifier.TEST_FILE)
    print(f"model: {size_bytes(options.model) / 1e6:.2f} MB")
    print(
        f"judge: {classifier.accuracy(judge, unseen):.3f} right on {len(unseen.labels)} digits "
        "that neither it nor the model saw"
    )
    print(f"{options.pictures} pictures per row, guidance {options.guidance}, seed {options.seed}")
    print(f"{'prompts':<16} steps  digit  foreground  background  all three")
    for steps in options.steps:
        for name, phrasings in CLASSES.items():
            asked = prompts(phrasings, options.pictures)
            pictures = draw_all(pipeline, asked, steps=steps, **how)
            result = score(judge, pictures, asked)
            print(
                f"{name:<16} {steps:>5}  {result.digit:.3f}  {result.foreground:>10.3f}"
                f"  {result.background:>10.3f}  {result.everything:>9.3f}",
                flush=True,
            )
    if options.sheet is not None:
        asked = sheet.prompts()
        pictures = draw_all(pipeline, asked, steps=options.steps[-1], **how)
        sheet.save(pictures, asked, options.sheet)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__)
    parser.add_argument("--model", type=Path, default=BUNDLED, help="folder of the pipeline")
    parser.add_argument("--judge", type=Path, default=JUDGE, help="folder of the classifier")
    parser.add_argument("--steps", type=int, nargs="+", default=[STEPS])
    parser.add_argument("--guidance", type=float, default=GUIDANCE)
    parser.add_argument("--sequence", type=int, default=SEQUENCE, help="max_sequence_length")
    parser.add_argument("--pictures", type=int, default=400, help="per class")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sheet", type=Path, help="write a contact sheet to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
