"""Several ranks for one request: what they make together is what one rank makes alone."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import wait
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

import checkpoints
from seen import Unwatched, differ, pictures_of, up, wanted
from stopbath.config import ServeConfig
from stopbath.errors import UsageError, WorkerLost
from stopbath.executor.multiproc import MultiprocExecutor
from stopbath.messages import (
    CANCELLED,
    GENERATE,
    PEER_FAILED,
    PING,
    REQUEST_INVALID,
)

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("diffusers")

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

START_S, WAIT_S = 60.0, 60.0
CAPACITY = 8
KINDS = {  # by name: model, --parallel, --mode
    "ulysses": ("flux", "ulysses", "request"),
    "cfg, step mode": ("sd3", "cfg", "step"),
    "ulysses, step mode": ("flux", "ulysses", "step"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: getattr(checkpoints, name)(root / name) for name in ("flux", "sd3", "qwen_image")}


def replica_of(model: Path, parallel: Any, mode: Any, ranks: int) -> MultiprocExecutor:
    config = ServeConfig(
        model=str(model),
        ranks=ranks,
        parallel=parallel,
        worker_extension="extension_for_tests:fail_on_rank_1",
        mode=mode,
        max_batch=CAPACITY,
        device="cpu",
        zygote=ranks > 1,  # as `serve` has it
    ).checked()
    return MultiprocExecutor(config)


def running(
    model: Path, parallel: Any, mode: Any, ranks: int = 2
) -> contextlib.AbstractContextManager[MultiprocExecutor]:
    return up(replica_of(model, parallel, mode, ranks), START_S, WAIT_S)


@pytest.fixture(scope="module")
def alone_of(models: dict[str, Path]) -> Any:
    """Give a model on one rank, in this process: diffusers' own pipeline, unsplit."""

    @cache
    def load(model: str) -> Any:
        from stopbath.pipelines.diffusers import DiffusersPipeline

        return DiffusersPipeline.load(str(models[model]), "cpu")

    return load


@pytest.fixture(scope="module", params=list(KINDS))
def pair(
    models: dict[str, Path], alone_of: Any, request: pytest.FixtureRequest
) -> Iterator[tuple[Any, MultiprocExecutor]]:
    """One rank and two, of the same model."""
    model, parallel, mode = KINDS[request.param]
    with running(models[model], parallel, mode) as two:
        yield alone_of(model), two


def made(replica: MultiprocExecutor, **more: Any) -> list[Any]:
    call = replica.call(GENERATE, wanted(**more), ranks="first")
    return pictures_of(call.future.result(WAIT_S)[0])


def alone(pipeline: Any, **more: Any) -> list[Any]:
    import numpy as np

    images = pipeline.generate(wanted(**more), Unwatched())
    return [np.array(image).astype(int) for image in images]


def begun(replica: MultiprocExecutor, **more: Any) -> Any:
    """Begin a request, and wait until it has had a step."""
    inside = threading.Event()
    call = replica.call(GENERATE, wanted(**more), on_progress=lambda _s, _n: inside.set())
    assert inside.wait(WAIT_S)
    return call


def test_two_ranks_make_the_pictures_of_one(
    pair: tuple[Any, MultiprocExecutor],
) -> None:
    one, two = pair
    for more in (
        {},
        {"n": 3, "seed": 1},
        {"guidance_scale": 1.0},
        {"width": 64, "num_inference_steps": 7, "negative_prompt": "dark"},
    ):
        ours, theirs = made(two, **more), alone(one, **more)
        assert theirs[0].std() > 5, "a flat picture proves nothing"
        assert len(ours) == len(theirs) == more.get("n", 1)
        assert max(differ(a, b) for a, b in zip(ours, theirs, strict=True)) <= 1


def test_requests_together_make_the_pictures_of_each_alone(
    pair: tuple[Any, MultiprocExecutor],
) -> None:
    one, two = pair
    calls = [
        two.call(GENERATE, wanted(seed=i, num_inference_steps=2 + i % 3, width=32 + 32 * (i % 2)))
        for i in range(2 * CAPACITY)
    ]
    for i, call in enumerate(calls):
        outcomes = call.future.result(WAIT_S)
        assert [outcome.ok for outcome in outcomes] == [True, True]
        assert outcomes[1].value is None, "one rank makes the picture"
        (theirs,) = alone(one, seed=i, num_inference_steps=2 + i % 3, width=32 + 32 * (i % 2))
        assert differ(pictures_of(outcomes[0])[0], theirs) <= 1


def test_cancels_at_any_moment_never_part_the_ranks(
    pair: tuple[Any, MultiprocExecutor],
) -> None:
    _, two = pair
    before = made(two)[0]
    company = begun(two, num_inference_steps=1000)
    calls = []
    for i in range(40):
        calls.append(two.call(GENERATE, wanted(num_inference_steps=6, seed=i)))
        time.sleep(0.0005 * (i % 10))  # the moment itself is what varies here
        two.cancel(calls[-1].id)
    two.cancel(company.id)
    _, late = wait([call.future for call in [company, *calls]], WAIT_S)
    assert not late
    for call in calls:
        kinds = {outcome.error_kind for outcome in call.future.result()}
        assert len(kinds) == 1, kinds
        assert kinds <= {None, CANCELLED}
    assert {o.error_kind for o in company.future.result()} == {CANCELLED}
    assert differ(made(two)[0], before) == 0
    assert [outcome.value for outcome in two.call(PING, 1).future.result(WAIT_S)] == [1, 1]


def test_a_bad_request_ends_alone_on_both_ranks(
    pair: tuple[Any, MultiprocExecutor],
) -> None:
    _, two = pair
    company = begun(two, num_inference_steps=60)
    outcomes = two.call(GENERATE, wanted(width=33)).future.result(WAIT_S)
    assert [outcome.error_kind for outcome in outcomes] == [REQUEST_INVALID] * 2
    assert all(outcome.ok for outcome in company.future.result(WAIT_S))


@pytest.mark.parametrize("mode", ["request", "step"])
def test_a_size_whose_tokens_cannot_be_spread_is_refused_and_harms_nobody(
    models: dict[str, Path], mode: str
) -> None:
    """3 tokens of 16 pixels in a row and one row: no rank enters the pass, so none hangs in it."""
    with running(models["flux"], "ulysses", mode) as two:
        outcomes = two.call(GENERATE, wanted(width=24, height=8)).future.result(WAIT_S)
        assert [outcome.error_kind for outcome in outcomes] == [REQUEST_INVALID] * 2
        assert "3 tokens, which cannot be spread over 2 ranks; choose another size" in (
            outcomes[0].error_message
        )
        assert made(two)
        rank = two.status().ranks[1]
        held = begun(two, num_inference_steps=1000)
        os.kill(rank.pid or 0, signal.SIGKILL)
        with pytest.raises(WorkerLost, match=r"rank1 .*SIGKILL"):
            held.future.result(WAIT_S)


def test_a_step_that_fails_on_one_rank_ends_the_requests_in_it_and_no_more(
    models: dict[str, Path],
) -> None:
    """The rank whose own fault it was says so; the other one has left unharmed."""
    with running(models["sd3"], "cfg", "step") as two:
        held = [begun(two, num_inference_steps=1000, seed=i) for i in range(2)]
        two.call("arm", None).future.result(WAIT_S)
        for call in held:
            kinds = [outcome.error_kind for outcome in call.future.result(WAIT_S)]
            assert kinds == [PEER_FAILED, "MemoryError"]
        assert made(two)
        held = [begun(two, num_inference_steps=1000, seed=i) for i in range(3)]
        os.kill(two.status().ranks[1].pid or 0, signal.SIGKILL)
        for call in held:
            with pytest.raises(WorkerLost, match=r"rank1 .*SIGKILL"):
                call.future.result(WAIT_S)


def test_a_rank_that_leaves_an_ulysses_step_ends_the_replica_with_the_reason(
    models: dict[str, Path],
) -> None:
    """Its peer sits in a collective that nothing can call off, and must not sit there for ever."""
    with running(models["flux"], "ulysses", "request") as two:
        held = begun(two, num_inference_steps=1000)
        two.call("arm", None)
        began = time.monotonic()
        two.cancel(held.id)
        held.future.result(WAIT_S)
        lost = two.call(GENERATE, wanted(), ranks="first")
        with pytest.raises(WorkerLost, match=r"rank1 .*left its peers in a step: MemoryError"):
            lost.future.result(WAIT_S)
        assert time.monotonic() - began < 10.0


def test_what_ulysses_cannot_do_is_refused_at_the_start(alone_of: Any) -> None:
    from stopbath.pipelines.base import ModelUnusable
    from stopbath.pipelines.joint import Peers
    from stopbath.pipelines.ulysses import UlyssesSplit

    with pytest.raises(UsageError, match="--parallel ulysses runs on 2 ranks or more, not on 1"):
        ServeConfig(parallel="ulysses").checked()
    for model, ranks, why in (
        ("sd3", 2, "StableDiffusion3Pipeline has no plan for context parallelism in diffusers"),
        ("flux", 3, "FluxPipeline has 2 attention heads, which cannot be spread over 3 ranks"),
    ):
        with pytest.raises(ModelUnusable, match=f"{why}; serve it without --parallel ulysses"):
            UlyssesSplit(alone_of(model).pipe, Peers(0, ranks, "cpu"))


def test_a_language_model_as_text_encoder_is_split_too(
    models: dict[str, Path], alone_of: Any
) -> None:
    """Qwen-Image runs guidance as two calls, and its text is as long as the prompt."""
    with running(models["qwen_image"], "ulysses", "request") as two:
        assert differ(made(two)[0], alone(alone_of("qwen_image"))[0]) <= 1
