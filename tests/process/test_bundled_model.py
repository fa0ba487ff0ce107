"""The bundled model: an ordinary diffusers folder that draws what it is told."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from training import classifier, evaluate
from training.captions import known_words
from training.export import size_bytes
from training.phrasings import CLASSES, UNSEEN, UNSEEN_COLOURED, Prompt, prompts

if TYPE_CHECKING:
    from training.classifier import DigitClassifier

PICTURES = 200
MAX_BYTES = 6_000_000
ENOUGH = {
    # phrasings: digit, each of the two colours
    "plain word": (0.97, 0.90),
    "numeral": (0.97, 0.90),
    "coloured": (0.95, 0.90),
    "unseen": (0.95, 0.80),
    "unseen coloured": (0.90, 0.75),
}

pytestmark = pytest.mark.timeout(110)


@pytest.fixture(scope="module")
def model() -> StableDiffusion3Pipeline:
    return evaluate.load_model(evaluate.BUNDLED)


@pytest.fixture(scope="module")
def judge() -> DigitClassifier:
    return classifier.load(evaluate.JUDGE)


def test_stock_diffusers_loads_it_in_float32(model: StableDiffusion3Pipeline) -> None:
    """`DiffusionPipeline.from_pretrained` needs no flag, and no part has another dtype."""
    assert isinstance(model, StableDiffusion3Pipeline)
    parts = [part for part in model.components.values() if isinstance(part, torch.nn.Module)]
    assert {part.dtype for part in parts} == {torch.float32}


def test_small_and_free_of_pickles() -> None:
    """Less than 6 MB, and weights only as safetensors."""
    assert size_bytes(evaluate.BUNDLED) < MAX_BYTES
    suffixes = {file.suffix for file in evaluate.BUNDLED.rglob("*") if file.is_file()}
    assert suffixes == {".json", ".md", ".safetensors", ".txt"}


def test_judge_is_right_on_digits_that_nobody_trained_on(judge: DigitClassifier) -> None:
    """The classifier's word counts: at least 97 % of unseen digits are named correctly."""
    unseen = classifier.load_test_digits(evaluate.JUDGE / classifier.TEST_FILE)
    assert classifier.accuracy(judge, unseen) >= 0.97


@pytest.mark.parametrize("kind", CLASSES)
def test_draws_the_digit_in_its_colours(
    model: StableDiffusion3Pipeline, judge: DigitClassifier, kind: str
) -> None:
    """The independent classifier sees the digit, and the nearest colours are the named ones.

    The pictures are those of `python -m training.evaluate --pictures 200`, as in the model card.
    """
    asked = prompts(CLASSES[kind], PICTURES)
    pictures = evaluate.draw_all(model, asked, seed=0)
    result = evaluate.score(judge, pictures, asked)
    digits, colours = ENOUGH[kind]
    assert result.digit >= digits, result
    assert min(result.foreground, result.background) >= colours, result


def test_long_question_is_understood(
    model: StableDiffusion3Pipeline, judge: DigitClassifier
) -> None:
    """The digit may stand at the end of a long phrase."""
    asked = [
        Prompt(f"Could you draw me the numeral {digit}?", digit, "white", "black")
        for digit in range(10)
        for _ in range(3)
    ]
    pictures = evaluate.draw(model, [prompt.text for prompt in asked], seed=2)
    assert evaluate.score(judge, pictures, asked).digit >= 0.9


@pytest.mark.parametrize("phrasing", [*UNSEEN, *UNSEEN_COLOURED])
def test_unseen_phrasings_use_words_that_training_never_wrote(phrasing: str) -> None:
    words = set(re.findall(r"[a-z]+", re.sub(r"{.}", " ", phrasing).lower()))
    assert words - set(known_words())


def test_defaults_make_one_small_picture(model: StableDiffusion3Pipeline) -> None:
    """Without a size the pipeline draws 32x32, its only trained size."""
    picture = model("seven", num_inference_steps=1).images[0]
    assert picture.size == (32, 32)


def test_length_of_the_silent_text_does_not_matter(model: StableDiffusion3Pipeline) -> None:
    """The stock 256 T5 tokens cost time and change almost nothing against 16."""
    texts = ["a red three on blue", "7", "nine in black on yellow"]
    short, stock = (evaluate.draw(model, texts, seed=3, sequence=n) for n in (16, 256))
    assert (short - stock).abs().mean() < 0.03


def test_equal_seeds_draw_equal_pictures(model: StableDiffusion3Pipeline) -> None:
    first, second = (evaluate.draw(model, ["a four"], seed=4) for _ in range(2))
    assert torch.equal(first, second)
