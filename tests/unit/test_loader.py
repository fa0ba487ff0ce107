"""Loading a checkpoint: what is wrong with a folder is said in one line, before torch is needed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stopbath.config import BUNDLED, model_path
from stopbath.pipelines.base import ModelUnusable
from stopbath.pipelines.loader import (
    ModelDefaults,
    load_pipeline,
    model_info,
)


def test_the_bundled_model_is_served_with_its_own_defaults() -> None:
    """Twelve steps at guidance 3: diffusers' own defaults are those of a large model."""
    told = json.loads((model_path(BUNDLED) / "stopbath.json").read_text())
    assert (told["num_inference_steps"], told["guidance_scale"]) == (12, 3.0)
    assert (told["max_width"], told["max_height"]) == (32, 32)


def test_the_bundled_model_has_a_name() -> None:
    assert model_path(BUNDLED).parent.name == "pipelines"
    assert model_path("/x/y") == Path("/x/y")


@pytest.mark.parametrize(
    ("files", "what"),
    [
        (None, "is not a folder"),
        ({}, "no model_index.json"),
        ({"model_index.json": "{"}, "cannot be read"),
        ({"model_index.json": "[]"}, "cannot be read"),
        ({"model_index.json": "{}"}, "names no pipeline"),
        ({"stopbath.json": '{"widht": 3}', "model_index.json": "{}"}, "unknown field `widht`"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_refused_in_one_line(
    tmp_path: Path, files: dict[str, str] | None, what: str
) -> None:
    folder = tmp_path / "model"
    if files is not None:
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    with pytest.raises(ModelUnusable, match=what) as error:
        load_pipeline(str(folder), "cpu")
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)


class FakeSD3:
    """Stands for a pipeline: only what `model_info` looks at."""

    default_sample_size = 8
    vae_scale_factor = 4
    unet = None
    tokenizer = SimpleNamespace(model_max_length=77)
    transformer = SimpleNamespace(config={"patch_size": 2, "pos_embed_max_size": 16})

    def __call__(
        self,
        prompt: str,
        num_inference_steps: int = 28,
        guidance_scale: float = 7.0,
        max_sequence_length: int = 256,
    ) -> Any:
        """Take what SD3 takes."""


def test_the_models_own_word_goes_before_the_pipelines_defaults() -> None:
    plain = model_info(FakeSD3(), ModelDefaults(), "cpu")
    assert (plain.width, plain.size_multiple, plain.max_width) == (32, 8, 128)
    assert (plain.num_inference_steps, plain.guidance_scale) == (28, 7.0)
    assert plain.max_prompt_tokens == 256
    own = ModelDefaults(num_inference_steps=12, guidance_scale=0.0, width=64, max_sequence_length=9)
    told = model_info(FakeSD3(), own, "cpu")
    assert (told.width, told.height) == (64, 32)
    assert (told.num_inference_steps, told.guidance_scale) == (12, 0.0)
    assert told.max_prompt_tokens == 9
