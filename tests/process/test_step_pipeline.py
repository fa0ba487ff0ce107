"""Step mode held against diffusers, family by family, in this process: latents, pictures, bits."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

import checkpoints
from stopbath.errors import RequestInvalid
from stopbath.messages import GenerationRequest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stopbath.pipelines.base import Sample
    from stopbath.pipelines.step import BatchedPipeline

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

FAMILIES = ["sd3", "flux", "sd15", "sdxl"]
# The layers of a transformer are matrix products, whose rows can be kept apart. Convolutions
# choose their way of computing by the number of threads and pictures.
TRANSFORMERS = ["sd3", "flux"]
TEXT_TOKENS = 16


def request(prompt: str = "a red seven", **more: Any) -> GenerationRequest:
    plain: dict[str, Any] = {
        "id": "r",
        "width": 32,
        "height": 32,
        "seed": 7,
        "num_inference_steps": 4,
        "guidance_scale": 3.0,
    }
    return GenerationRequest(prompt=prompt, **{**plain, **more})


MIXED = [
    request(),
    request("blue", seed=1, num_inference_steps=7, guidance_scale=5.0, negative_prompt="dark"),
    request("a green one", seed=9, guidance_scale=1.0, n=2),
    request("eight", seed=3, num_inference_steps=3, n=3),
    request("wide", width=48, seed=2**64 - 1),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model_of(folder: Path) -> Any:
    @cache
    def load(family: str) -> BatchedPipeline:
        from stopbath.pipelines.step import BatchedPipeline

        pipeline = BatchedPipeline.load(str(path_of(family)), "cpu")
        pipeline.warm_up()
        return pipeline

    @cache
    def path_of(family: str) -> Path:
        path: Path = getattr(checkpoints, family)(folder / family)
        return path

    load.path_of = path_of  # type: ignore[attr-defined]
    return load


def begun(model: BatchedPipeline, requests: Sequence[GenerationRequest]) -> list[Sample]:
    samples = model.begin(requests)
    for sample in samples:
        if isinstance(sample, Exception):
            raise sample
    return samples  # type: ignore[return-value]


def turn(model: BatchedPipeline, samples: Sequence[Sample]) -> None:
    """Give every sample that is not over one step, those of one shape together."""
    live = [sample for sample in samples if not sample.over]
    while live:
        together = [sample for sample in live if sample.shape == live[0].shape]
        assert model.step(together) == [None] * len(together)
        live = [sample for sample in live if sample not in together]


def finished(model: BatchedPipeline, samples: Sequence[Sample]) -> list[Sample]:
    while not all(sample.over for sample in samples):
        turn(model, samples)
    return list(samples)


def theirs(family: str, path: Path, wanted: GenerationRequest, output: str) -> Any:
    """Have plain diffusers answer a request."""
    arguments: dict[str, Any] = {
        "prompt": wanted.prompt,
        "width": wanted.width,
        "height": wanted.height,
        "num_inference_steps": wanted.num_inference_steps,
        "guidance_scale": wanted.guidance_scale,
        "num_images_per_prompt": wanted.n,
        "generator": [
            torch.Generator("cpu").manual_seed((wanted.seed + i) % 2**64) for i in range(wanted.n)
        ],
        "output_type": output,
    }
    if family in TRANSFORMERS:
        arguments["max_sequence_length"] = TEXT_TOKENS
    if wanted.negative_prompt:
        arguments["negative_prompt"] = wanted.negative_prompt
    return plain_pipe(path)(**arguments).images


@cache
def plain_pipe(path: Path) -> Any:
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(str(path), local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def far(one: Any, other: Any) -> float:
    """Give the largest difference."""
    return float(np.abs(np.asarray(one, dtype=float) - np.asarray(other, dtype=float)).max())


def latents_apart(sample: Sample, expected: Any) -> float:
    """Give the largest difference of latents whose spread is 1, as a trained model's is.

    A UNet with random weights removes no noise: its latents are a hundred times as large.
    """
    return far(sample.latents, expected) / max(1.0, float(expected.std()))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_equals_diffusers(family: str, model_of: Any) -> None:
    """Own seeds, step counts, guidance, prompts and sizes; some join while others are under way."""
    model, path = model_of(family), model_of.path_of(family)
    samples = begun(model, MIXED[:2])
    turn(model, samples)
    samples += begun(model, MIXED[2:4])
    turn(model, samples)
    samples += begun(model, MIXED[4:])
    finished(model, samples)
    pictures = model.finish(samples)
    for wanted, sample, images in zip(MIXED, samples, pictures, strict=True):
        assert latents_apart(sample, theirs(family, path, wanted, "latent")) <= 1e-4
        expected = theirs(family, path, wanted, "pil")
        assert np.asarray(expected[0]).std() > 5, "a flat picture proves nothing"
        assert len(images) == wanted.n
        for image, plain in zip(images, expected, strict=True):
            assert far(image, plain) <= 1
        assert sample.steps_done == sample.steps == wanted.num_inference_steps


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_a_request_has_the_same_bits_alone_and_in_company(family: str, model_of: Any) -> None:
    """Whatever the number of rows, the place in the batch, and who comes and goes meanwhile."""
    from stopbath.pipelines.loader import denoiser_of

    model = model_of(family)
    if not rows_are_apart(denoiser_of(model.pipe)):
        pytest.skip("on this machine the bits of a matrix product depend on its other rows")
    company = begun(model, [request(p, seed=i, guidance_scale=g) for i, p, g in OTHERS])
    samples = begun(model, MIXED[:4])
    while not all(sample.over for sample in samples):
        turn(model, [*company, *samples])
        company = company[1:]
    for wanted, sample in zip(MIXED, samples, strict=False):
        (alone,) = finished(model, begun(model, [wanted]))
        assert torch.equal(alone.latents, sample.latents)


OTHERS = [(i, f"number {i}", 1.0 + i % 3) for i in range(5)]


def rows_are_apart(model: Any) -> bool:
    """Whether every layer has a number of rows from which on each has its own bits."""
    from stopbath.pipelines.rows import rows_enough

    linears = [it for it in model.modules() if isinstance(it, torch.nn.Linear)]
    shapes = {(it.in_features, it.out_features): it for it in linears}
    return all(map(rows_enough, shapes.values()))


def test_layers_that_see_a_row_per_picture_are_padded_to_what_is_enough() -> None:
    """A layer alone gives one row the bits that it has among sixty others, once it is steady."""
    from stopbath.pipelines.rows import rows_enough, steady

    chance = torch.Generator().manual_seed(0)
    for features in (16, 48, 96, 256, 512):
        linear = torch.nn.Linear(features, 24)
        if not rows_enough(linear):
            continue
        x = torch.randn(64, features, generator=chance)
        with torch.no_grad():
            steady([linear], lambda linear=linear, x=x: linear(x[:1]))
            whole = linear(x)
            assert all(torch.equal(linear(x[:rows]), whole[:rows]) for rows in range(1, 64))


def test_ancestral_noise_comes_from_the_own_generator(model_of: Any) -> None:
    """A scheduler that draws at every step draws for each request from its own seed."""
    from diffusers import EulerAncestralDiscreteScheduler

    model, path = model_of("sd15"), model_of.path_of("sd15")
    plain = plain_pipe(path)
    usual = model.pipe.scheduler
    model.pipe.scheduler = EulerAncestralDiscreteScheduler.from_config(usual.config)
    plain.scheduler = EulerAncestralDiscreteScheduler.from_config(usual.config)
    try:
        samples = finished(model, begun(model, MIXED[:4]))
        for wanted, sample in zip(MIXED, samples, strict=False):
            assert latents_apart(sample, theirs("sd15", path, wanted, "latent")) <= 1e-4
    finally:
        model.pipe.scheduler = plain.scheduler = usual


def test_one_bad_request_does_not_spoil_those_it_came_with(
    model_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("sd3")
    encode = model.pipe.encode_prompt

    def picky(prompt: list[str], **how: Any) -> Any:
        if any("poison" in text for text in prompt):
            raise ValueError("cannot be encoded")
        return encode(prompt=prompt, **how)

    monkeypatch.setattr(model.pipe, "encode_prompt", picky)
    bad, poison, good = model.begin([request(width=33), request("poison"), request("fine")])
    assert isinstance(bad, RequestInvalid)
    assert isinstance(poison, ValueError)
    assert good.steps == 4


def test_a_scheduler_that_fails_ends_its_request_only(model_of: Any) -> None:
    model = model_of("sd3")
    samples = begun(model, [request(), request(seed=8), request(seed=9)])
    samples[1].scheduler.step = None
    one, two, three = model.step(samples)
    assert (one, three) == (None, None)
    assert isinstance(two, TypeError)
    assert [sample.calls for sample in samples] == [1, 0, 1]


def test_encoded_prompts_are_kept_up_to_a_bound(model_of: Any) -> None:
    model = model_of("sd3")
    for i in range(100):
        model.begin([request(f"prompt {i}")])
    assert len(model._texts) <= 32
    assert "" in model._texts, "the one that every request needs is never forgotten"


def test_step_mode_refuses_what_nobody_took_apart(folder: Path) -> None:
    from stopbath.pipelines.base import ModelUnusable
    from stopbath.pipelines.step import BatchedPipeline

    path = checkpoints.pixart(folder / "pixart")
    with pytest.raises(ModelUnusable, match="not PixArtSigmaPipeline; serve it with --mode req"):
        BatchedPipeline.load(str(path), "cpu")


def test_padding_costs_no_row_where_there_is_guidance(
    model_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows for a guided picture; one without guidance is padded to two."""
    model = model_of("sd3")
    rows: list[int] = []
    monkeypatch.setattr(
        model.pipe.transformer, "forward", spying(model.pipe.transformer.forward, rows)
    )
    for guidance in (3.0, 1.0):
        model.step(begun(model, [request(guidance_scale=guidance)]))
    assert rows == [2, 2]


def spying(forward: Any, rows: list[int]) -> Any:
    def spy(*args: Any, **kwargs: Any) -> Any:
        rows.append(len(kwargs["hidden_states"]))
        return forward(*args, **kwargs)

    return spy
