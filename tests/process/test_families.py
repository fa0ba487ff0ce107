"""Request mode over a real rank, for the families that `test_pictures` does not go through."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

import checkpoints
from seen import differ, pictures_of, up, wanted
from stopbath.config import ServeConfig
from stopbath.executor.multiproc import MultiprocExecutor
from stopbath.messages import CANCELLED, GENERATE

if TYPE_CHECKING:
    import contextlib
    from pathlib import Path

np = pytest.importorskip("numpy")
pytest.importorskip("diffusers")

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

START_S, WAIT_S = 60.0, 60.0
STEPS, SIDE = 4, 32


def running(model: Path) -> contextlib.AbstractContextManager[MultiprocExecutor]:
    return up(MultiprocExecutor(ServeConfig(model=str(model), device="cpu")), START_S, WAIT_S)


def picture(replica: MultiprocExecutor, side: int) -> Any:
    call = replica.call(GENERATE, wanted(width=side, height=side), ranks="first")
    (only,) = pictures_of(call.future.result(WAIT_S)[0])
    return only


def plain_diffusers(model: Path, *, side: int = SIDE, **more: Any) -> Any:
    import torch
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(str(model), local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    arguments: dict[str, Any] = {"guidance_scale": 3.0, "num_inference_steps": STEPS, **more}
    generator = torch.Generator("cpu").manual_seed(7)
    image = pipe("a red seven", width=side, height=side, generator=generator, **arguments).images[0]
    return np.array(image).astype(int)


# What the pipeline of a family is asked beside what all are: its own names for the same things.
OWN_WORDS: dict[str, dict[str, Any]] = {
    "flux": {"max_sequence_length": 16},
    "sdxl": {},
    "pixart": {"max_sequence_length": 16, "side": 256},
    "qwen_image": {
        "max_sequence_length": 32,
        "guidance_scale": None,
        "true_cfg_scale": 3.0,
        "negative_prompt": " ",
    },
}


@pytest.mark.parametrize("family", OWN_WORDS)
def test_any_family_makes_its_own_pictures_and_gives_up_at_a_step(
    tmp_path: Path, family: str
) -> None:
    """The picture is plain diffusers', progress counts its steps, a cancel comes between two."""
    path: Path = getattr(checkpoints, family)(tmp_path / family)
    words = OWN_WORDS[family]
    side = words.get("side", SIDE)
    theirs = plain_diffusers(path, **words)
    assert theirs.std() > 5, "a flat picture proves nothing"
    with running(path) as replica:
        assert differ(picture(replica, side), theirs) <= 1
        steps: list[tuple[int, int]] = []
        inside = threading.Event()

        def note(step: int, of: int) -> None:
            steps.append((step, of))
            inside.set()

        long = wanted(width=side, height=side, num_inference_steps=1000)
        call = replica.call(GENERATE, long, on_progress=note)
        assert inside.wait(WAIT_S)
        replica.cancel(call.id)
        assert [outcome.error_kind for outcome in call.future.result(WAIT_S)] == [CANCELLED]
        assert steps[0] == (1, 1000)
        assert steps[-1][0] < 1000
        assert differ(picture(replica, side), theirs) <= 1
