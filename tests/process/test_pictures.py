"""Real ranks with tiny random checkpoints: one rank or two, the pictures are diffusers' own."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import checkpoints
from seen import differ, pictures_of, up, wanted
from stopbath.config import ServeConfig
from stopbath.errors import WorkerLost
from stopbath.executor.multiproc import MultiprocExecutor
from stopbath.lifecycle import Deadline, GroupState, StartupError
from stopbath.messages import CANCELLED, GENERATE, PING, REQUEST_INVALID

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Iterator
    from pathlib import Path

np = pytest.importorskip("numpy")
pytest.importorskip("diffusers")

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

START_S, WAIT_S = 120.0, 60.0
STEPS = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "sd3": checkpoints.sd3(root / "sd3"),
        "sd15": checkpoints.sd15(root / "sd15"),
        "flux": checkpoints.flux(root / "flux"),
    }


def replica_of(model: Path, ranks: int, **more: Any) -> MultiprocExecutor:
    parallel = "cfg" if ranks > 1 else "none"
    told: dict[str, Any] = {"parallel": parallel, "zygote": ranks > 1, "device": "cpu", **more}
    config = ServeConfig(model=str(model), ranks=ranks, **told)
    return MultiprocExecutor(config)


def running(model: Path, ranks: int) -> contextlib.AbstractContextManager[MultiprocExecutor]:
    return up(replica_of(model, ranks), START_S, WAIT_S)


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> Iterator[MultiprocExecutor]:
    with running(models["sd3"], 1) as replica:
        yield replica


@pytest.fixture(scope="module")
def two(models: dict[str, Path]) -> Iterator[MultiprocExecutor]:
    with running(models["sd3"], 2) as replica:
        yield replica


def pictures(replica: MultiprocExecutor, **more: Any) -> list[Any]:
    """Have a request answered: one (H, W, 3) array of int per picture."""
    (outcome,) = replica.call(GENERATE, wanted(**more), ranks="first").future.result(WAIT_S)
    return pictures_of(outcome)


def plain_diffusers(model: Path, *, seed: int = 7, **more: Any) -> Any:
    import torch
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(str(model), local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    arguments: dict[str, Any] = {"guidance_scale": 3.0, "num_inference_steps": STEPS, **more}
    generator = torch.Generator("cpu").manual_seed(seed)
    image = pipe("a red seven", width=32, height=32, generator=generator, **arguments).images[0]
    return np.array(image).astype(int)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("guidance", [3.0, 1.0])
def test_a_seed_gives_the_picture_of_plain_diffusers(
    models: dict[str, Path], ranks: int, guidance: float, request: pytest.FixtureRequest
) -> None:
    """On one rank and on two, with guidance (halves on two ranks) and without."""
    replica = request.getfixturevalue("alone" if ranks == 1 else "two")
    theirs = plain_diffusers(models["sd3"], guidance_scale=guidance, max_sequence_length=16)
    (ours,) = pictures(replica, guidance_scale=guidance)
    assert theirs.std() > 5, "a flat picture proves nothing"
    assert differ(ours, theirs) <= 1


def test_a_negative_prompt_counts(models: dict[str, Path], two: MultiprocExecutor) -> None:
    theirs = plain_diffusers(models["sd3"], negative_prompt="blue", max_sequence_length=16)
    assert differ(pictures(two, negative_prompt="blue")[0], theirs) <= 1
    assert differ(pictures(two)[0], theirs) > 1


def test_every_picture_of_a_request_can_be_had_alone(
    alone: MultiprocExecutor, two: MultiprocExecutor
) -> None:
    """Picture i is that of seed + i."""
    for replica in (alone, two):
        together = pictures(replica, n=3)
        assert differ(together[0], together[2]) > 5
        for i, picture in enumerate(together):
            assert differ(picture, pictures(replica, seed=7 + i)[0]) <= 1


@pytest.mark.parametrize("output_format", ["png", "jpeg", "webp"])
def test_pictures_come_in_the_format_asked_for(
    alone: MultiprocExecutor, output_format: Any
) -> None:
    (picture,) = pictures(alone, output_format=output_format)
    assert picture.shape == (32, 32, 3)


def test_a_unet_with_a_multistep_scheduler_works_on_two_ranks(models: dict[str, Path]) -> None:
    with running(models["sd15"], 2) as replica:
        assert differ(pictures(replica)[0], plain_diffusers(models["sd15"])) <= 1


def test_progress_comes_from_rank_0(two: MultiprocExecutor) -> None:
    steps: list[tuple[int, int]] = []
    call = two.call(
        GENERATE,
        wanted(num_inference_steps=30),
        on_progress=lambda step, of: steps.append((step, of)),
    )
    call.future.result(WAIT_S)
    assert steps[-1] == (30, 30)
    assert [step for step, _ in steps] == sorted({step for step, _ in steps})


def cancel_in_the_middle(replica: MultiprocExecutor) -> None:
    inside = threading.Event()
    call = replica.call(
        GENERATE, wanted(num_inference_steps=1000), on_progress=lambda _s, _n: inside.set()
    )
    assert inside.wait(WAIT_S)
    replica.cancel(call.id)
    assert {o.error_kind for o in call.future.result(WAIT_S)} == {CANCELLED}


@pytest.mark.parametrize("guidance", [3.0, 1.0])
def test_a_cancel_in_the_middle_leaves_both_ranks_usable(
    two: MultiprocExecutor, guidance: float
) -> None:
    before = pictures(two, guidance_scale=guidance)[0]
    for _ in range(3):
        cancel_in_the_middle(two)
        assert differ(pictures(two, guidance_scale=guidance)[0], before) == 0


def test_cancels_at_any_moment_never_part_the_ranks(two: MultiprocExecutor) -> None:
    """Ranks see a cancel at different moments; sooner or later some fall between two steps."""
    for i in range(40):
        call = two.call(GENERATE, wanted(num_inference_steps=6))
        time.sleep(0.001 * i)  # the moment itself is what varies here, nothing waits for it
        two.cancel(call.id)
        kinds = {outcome.error_kind for outcome in call.future.result(WAIT_S)}
        assert len(kinds) == 1, kinds
        assert kinds <= {None, CANCELLED}
    assert [outcome.ok for outcome in two.call(PING, 1).future.result(WAIT_S)] == [True, True]


def test_a_request_the_model_cannot_do_is_refused_on_both_ranks(two: MultiprocExecutor) -> None:
    outcomes = two.call(GENERATE, wanted(width=33)).future.result(WAIT_S)
    assert [outcome.error_kind for outcome in outcomes] == [REQUEST_INVALID] * 2
    assert "multiple of 8" in outcomes[0].error_message
    assert pictures(two)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_in_a_step_ends_the_future_naming_it(
    models: dict[str, Path], rank: int
) -> None:
    """The other rank's broken collective, which may be heard of first, is not the cause."""
    with running(models["sd3"], 2) as replica:
        inside = threading.Event()
        call = replica.call(
            GENERATE,
            wanted(num_inference_steps=1000),
            ranks="first",
            on_progress=lambda _s, _n: inside.set(),
        )
        assert inside.wait(WAIT_S)
        os.kill(replica.status().ranks[rank].pid or 0, signal.SIGKILL)
        with pytest.raises(WorkerLost, match=rf"rank{rank} .*SIGKILL"):
            call.future.result(WAIT_S)
        replica.shutdown(Deadline.after(WAIT_S))
        assert replica.status().state is GroupState.STOPPED


def test_a_model_without_batched_guidance_is_refused_with_the_reason(
    models: dict[str, Path],
) -> None:
    replica = replica_of(models["flux"], 2)
    replica.start()
    with pytest.raises(StartupError, match="FluxPipeline does not run both halves of guidance"):
        replica.wait_ready(Deadline.after(START_S))
    replica.shutdown(Deadline.after(WAIT_S))


def test_a_stop_while_loading_does_not_wait_for_the_loading(models: dict[str, Path]) -> None:
    """Nothing was accepted yet, so a rank leaves at once, whatever its main thread is deep in."""
    replica = replica_of(models["sd3"], 2, drain_s=20.0, zygote=False)  # it shows the import
    replica.start()
    by = Deadline.after(WAIT_S)
    group = replica._started()
    while not all(worker.phase == "importing torch" for worker in group.workers):
        assert not by.passed
        time.sleep(0.01)
    report = replica.shutdown(Deadline.after(WAIT_S))
    assert report.clean
    assert report.duration_s < 3.0


def test_an_extension_runs_in_every_rank_before_it_is_ready(models: dict[str, Path]) -> None:
    replica = replica_of(models["flux"], 1, worker_extension="extension_for_tests:extend")
    replica.start()
    try:
        replica.wait_ready(Deadline.after(START_S))
        (outcome,) = replica.call("whoami", None).future.result(WAIT_S)
        assert outcome.value == ["replica0/rank0", "FluxPipeline", "cpu"]
    finally:
        replica.shutdown(Deadline.after(WAIT_S))
