"""Step mode over a real rank: who is in the batch, who leaves it, and what is left afterwards."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import checkpoints
from seen import pictures_of, up, wanted
from served import serve
from stopbath.config import ServeConfig
from stopbath.errors import UsageError
from stopbath.executor.multiproc import MultiprocExecutor
from stopbath.lifecycle import Deadline, StartupError
from stopbath.messages import CANCELLED, GENERATE, PING, REQUEST_INVALID, GenerationRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

np = pytest.importorskip("numpy")
pytest.importorskip("diffusers")

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

START_S, WAIT_S = 60.0, 60.0
CAPACITY = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.sd3(tmp_path_factory.mktemp("models") / "sd3")


def replica_of(model: Path, **more: Any) -> MultiprocExecutor:
    config = ServeConfig(
        model=str(model), mode="step", max_batch=CAPACITY, device="cpu", **more
    ).checked()
    return MultiprocExecutor(config)


@pytest.fixture(scope="module")
def replica(model: Path) -> Iterator[MultiprocExecutor]:
    with up(replica_of(model), START_S, WAIT_S) as it:
        yield it


def begin(replica: MultiprocExecutor, **more: Any) -> Any:
    return replica.call(GENERATE, wanted(**more), ranks="first")


def begun(replica: MultiprocExecutor, **more: Any) -> Any:
    """Begin a request, and wait until it has had a step."""
    inside = threading.Event()
    call = replica.call(
        GENERATE, wanted(**more), ranks="first", on_progress=lambda _s, _n: inside.set()
    )
    assert inside.wait(WAIT_S)
    return call


def outcome(call: Any) -> Any:
    (it,) = call.future.result(WAIT_S)
    return it


def pictures(call: Any) -> list[Any]:
    return pictures_of(outcome(call))


def plain_diffusers(model: Path, asked: GenerationRequest) -> Any:
    import torch
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(str(model), local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    image = pipe(
        asked.prompt,
        negative_prompt=asked.negative_prompt or None,
        width=asked.width,
        height=asked.height,
        num_inference_steps=asked.num_inference_steps,
        guidance_scale=asked.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(asked.seed),
        max_sequence_length=16,
    ).images[0]
    return np.array(image).astype(int)


def test_requests_in_a_batch_get_the_pictures_of_plain_diffusers(
    model: Path, replica: MultiprocExecutor
) -> None:
    several: list[dict[str, Any]] = [
        {},
        {"seed": 8, "num_inference_steps": 9, "prompt": "blue", "negative_prompt": "dark"},
        {"seed": 9, "guidance_scale": 1.0},
        {"seed": 10, "width": 48, "guidance_scale": 7.0},
    ]
    company = begun(replica, num_inference_steps=1000)
    made = [pictures(call) for call in [begin(replica, **one) for one in several]]
    assert not company.future.done(), "they should not have waited for the one before them"
    replica.cancel(company.id)
    assert outcome(company).error_kind == CANCELLED
    for one, (picture,) in zip(several, made, strict=True):
        theirs = plain_diffusers(model, wanted(**one))
        assert theirs.std() > 5, "a flat picture proves nothing"
        assert np.abs(picture - theirs).max() <= 1


def test_pictures_of_one_request_can_be_had_alone(replica: MultiprocExecutor) -> None:
    together = pictures(begin(replica, n=3))
    for i, picture in enumerate(together):
        (alone,) = pictures(begin(replica, seed=7 + i))
        assert np.abs(alone - picture).max() <= 1


def test_a_cancel_ends_one_of_three(replica: MultiprocExecutor) -> None:
    long = {"num_inference_steps": 300}
    expected = pictures(begin(replica, **long))
    one, two, three = (begun(replica, **long) for _ in range(3))
    replica.cancel(two.id)
    assert outcome(two).error_kind == CANCELLED
    for call in (one, three):
        assert np.abs(pictures(call)[0] - expected[0]).max() <= 1


def test_progress_comes_for_each_request(replica: MultiprocExecutor) -> None:
    heard: dict[int, list[int]] = {20: [], 30: [], 40: []}
    calls = [
        replica.call(
            GENERATE,
            wanted(num_inference_steps=steps),
            ranks="first",
            on_progress=lambda step, of: heard[of].append(step),
        )
        for steps in heard
    ]
    for call in calls:
        assert outcome(call).ok
    for steps, said in heard.items():
        assert said == sorted(set(said))
        assert said[-1] == steps


def test_a_bad_request_ends_alone_and_calls_are_answered_between_steps(
    replica: MultiprocExecutor,
) -> None:
    company = begun(replica, num_inference_steps=1000)
    assert outcome(begin(replica, width=33)).error_kind == REQUEST_INVALID
    assert outcome(replica.call(PING, 5)).value == 5
    assert not company.future.done()
    replica.cancel(company.id)
    assert outcome(company).error_kind == CANCELLED


def test_a_deadline_ends_its_request_only(replica: MultiprocExecutor) -> None:
    from stopbath.errors import DeadlinePassed

    company = begun(replica, num_inference_steps=1000)
    late = replica.call(GENERATE, wanted(num_inference_steps=1000), deadline=Deadline.after(0.1))
    with pytest.raises(DeadlinePassed):
        late.future.result(WAIT_S)
    assert not company.future.done()
    replica.cancel(company.id)
    outcome(company)


def test_a_thousand_requests_half_of_them_aborted_leave_nothing(
    replica: MultiprocExecutor,
) -> None:
    """Resident memory, descriptors and pending calls are as before, on both sides."""
    pid = replica.status().ranks[0].pid or 0
    flood(replica, 200, seed=0)
    before = fds(pid), fds(os.getpid()), resident_kb(pid), resident_kb(os.getpid())
    ended = flood(replica, 1000, seed=1)
    after = fds(pid), fds(os.getpid()), resident_kb(pid), resident_kb(os.getpid())
    assert ended["done"] + ended["aborted"] == 1000
    assert min(ended.values()) > 250, ended
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 8 << 10, "the rank grew by more than 8 MiB"
    assert after[3] - before[3] < 8 << 10, "this process grew by more than 8 MiB"
    assert len(replica._calls) == 0


def flood(replica: MultiprocExecutor, count: int, *, seed: int) -> dict[str, int]:
    """Run so many requests, twice the capacity at a time; every other is given up somewhere.

    A request to be given up goes when another one has ended: at any step, or in the queue.
    """
    chance = random.Random(seed)  # noqa: S311  (so that a failure comes again)
    room = threading.Semaphore(2 * CAPACITY)
    doomed: list[int] = []
    lock = threading.Lock()

    def ended(_future: Any) -> None:
        room.release()
        with lock:
            victims = [doomed.pop(chance.randrange(len(doomed)))] if doomed else []
        for victim in victims:
            replica.cancel(victim)

    calls = []
    for i in range(count):
        assert room.acquire(timeout=WAIT_S)
        call = begin(replica, seed=i, prompt=f"p{i % 50}", num_inference_steps=chance.randint(2, 6))
        if i % 2:
            with lock:
                doomed.append(call.id)
        call.future.add_done_callback(ended)
        calls.append(call)
    done, late = wait([call.future for call in calls], WAIT_S)
    assert not late
    aborted = sum(future.result()[0].error_kind == CANCELLED for future in done)
    return {"done": sum(future.result()[0].ok for future in done), "aborted": aborted}


def fds(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def resident_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line)


def test_a_stop_finishes_nothing_that_nobody_waits_for(model: Path) -> None:
    """The executor ends its calls first; the rank then leaves within its drain."""
    it = replica_of(model)
    it.start()
    it.wait_ready(Deadline.after(START_S))
    call = begun(it, num_inference_steps=1000)
    report = it.shutdown(Deadline.after(WAIT_S))
    assert report.clean
    assert [worker.outcome for worker in report.workers] == ["drained"]
    with pytest.raises(Exception, match="stopping"):
        call.future.result(0)


def test_what_step_mode_cannot_do_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--max-batch must be at least 1"):
        ServeConfig(mode="step", max_batch=0).checked()
    it = replica_of(checkpoints.pixart(tmp_path / "pixart"))
    it.start()
    with (
        _stopped(it),
        pytest.raises(StartupError, match="not PixArtSigmaPipeline; serve it with --mode request"),
    ):
        it.wait_ready(Deadline.after(START_S))


@contextlib.contextmanager
def _stopped(replica: MultiprocExecutor) -> Iterator[None]:
    try:
        yield
    finally:
        replica.shutdown(Deadline.after(WAIT_S))


def test_a_request_that_was_put_on_hold_gives_the_same_picture(replica: MultiprocExecutor) -> None:
    """Bit for bit, also when the batch was another one meanwhile."""
    (expected,) = pictures(begin(replica, num_inference_steps=200))
    call = begun(replica, num_inference_steps=200)
    for seed in range(3):
        replica.hold(call.id)
        assert pictures(begin(replica, seed=seed, n=2))
        assert not call.future.done()
        assert replica.resume(call.id)
    (picture,) = pictures(call)
    assert (picture == expected).all()


def test_an_urgent_request_of_a_client_is_answered_before_one_that_runs(tmp_path: Path) -> None:
    """Over HTTP: the other one is on hold meanwhile, and its picture is as without."""
    usual = {"num_inference_steps": 300, "seed": 3}
    with serve(
        tmp_path, target="stopbath.server.main:main", model="bundled", mode="step", max_batch=1
    ) as server:
        expected = server.ask(**usual).wait()[0].json()["data"]
        held = server.ask(**usual)
        server.running(1)
        answer, came_s = server.ask(priority=1, num_inference_steps=4).wait()
        assert answer.status_code == 200
        late, late_s = held.wait()
        assert late.json()["data"] == expected
        assert came_s < late_s
