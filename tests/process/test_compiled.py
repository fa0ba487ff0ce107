"""`--compile`: the same pictures, everything compiled before ready, and no compiler left behind."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import checkpoints
from observing import COOKIE, alive, wait_until
from seen import Unwatched, wanted
from stopbath.config import ServeConfig
from stopbath.errors import UsageError
from stopbath.executor.multiproc import MultiprocExecutor
from stopbath.lifecycle import Deadline, StartupError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stopbath.messages import GenerationRequest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

START_S, WAIT_S = 100.0, 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.sd3(tmp_path_factory.mktemp("models") / "sd3")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile without its code generator: the same tracing in a second."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def in_request_mode(pipeline: Any, request: GenerationRequest) -> Any:
    return pipeline.generate(request, Unwatched())


def in_step_mode(pipeline: Any, request: GenerationRequest) -> Any:
    samples = pipeline.begin([request])
    while not samples[0].over:
        assert pipeline.step(samples) == [None]
    return pipeline.finish(samples)[0]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("mode", ["request", "step"])
def test_the_pictures_are_the_same_and_nothing_is_compiled_in_a_request(
    model: Path, mode: str
) -> None:
    """Whatever its size, number of pictures and guidance."""
    from torch._dynamo.utils import counters

    from stopbath.pipelines.diffusers import DiffusersPipeline
    from stopbath.pipelines.step import BatchedPipeline

    kind: Any = DiffusersPipeline if mode == "request" else BatchedPipeline
    run = in_request_mode if mode == "request" else in_step_mode
    plain, compiled = kind.load(str(model), "cpu"), kind.load(str(model), "cpu")
    compiled.compile()
    counters.clear()
    compiled.warm_up()
    before = counters["stats"]["unique_graphs"]
    assert before > 0, "it was not compiled"
    for more in ({}, {"n": 3}, {"guidance_scale": 1.0}, {"width": 48}, {"height": 64, "n": 2}):
        ours, theirs = run(compiled, wanted(**more)), run(plain, wanted(**more))
        for one, other in zip(ours, theirs, strict=True):
            assert np.abs(np.asarray(one).astype(int) - np.asarray(other)).max() <= 1
    assert counters["stats"]["unique_graphs"] == before


def test_a_machine_without_a_compiler_refuses_at_the_start(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    config = ServeConfig(model=str(model), compile=True, device="cpu")
    replica = MultiprocExecutor(config)
    replica.start()
    try:
        with pytest.raises(StartupError, match=r"needs a C\+\+ compiler .*; install it, or serve"):
            replica.wait_ready(Deadline.after(START_S))
    finally:
        replica.shutdown(Deadline.after(WAIT_S))


def test_compilation_and_ulysses_do_not_go_together() -> None:
    with pytest.raises(UsageError, match="--compile does not go with --parallel ulysses"):
        ServeConfig(compile=True, ranks=2, parallel="ulysses").checked()


def test_a_rank_killed_while_it_compiles_leaves_no_compiler(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are the rank's helpers, whatever session they are in: strays once it is dead."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing compiled yet
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a C++ compiler that is killed leaves its file
    replica = MultiprocExecutor(ServeConfig(model=str(model), compile=True, device="cpu"))
    replica.start()
    try:
        wait_until(compilers, Deadline.after(START_S), "a compiler runs")
        seen = compilers()
        os.kill(replica.status().ranks[0].pid or 0, signal.SIGKILL)
        with pytest.raises(StartupError, match="SIGKILL"):
            replica.wait_ready(Deadline.after(WAIT_S))
    finally:
        replica.shutdown(Deadline.after(WAIT_S))
    assert not [pid for pid in {*seen, *compilers()} if alive(pid)]


def compilers() -> list[int]:
    """Give the compilers that came of this test run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes()
            ours = COOKIE.encode() in (entry / "environ").read_bytes()
        except OSError:  # not a process, or gone
            continue
        if ours and any(name in command for name in (b"cc1plus", b"g++", b"compile_worker")):
            found.append(int(entry.name))
    return found
