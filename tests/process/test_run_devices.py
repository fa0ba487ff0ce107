"""`stopbath run` and device memory: foreign holders named, the release waited for and bounded.

The driver is a library of one device, compiled here, that nvidia-ml-py loads as it would load
the real one; a file is its ledger.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from observing import wait_until
from stopbath.lifecycle import Deadline
from stopbath.lifecycle._ledger import _Look
from wrapped import Wrapped, wrapping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

pytestmark = pytest.mark.usefixtures("nothing_left")

GIB = 1 << 30
SOURCE = Path(__file__).parent.parent / "fake_nvml.c"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the driver's library."""
    pytest.importorskip("pynvml")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to make a driver's library with")
    folder = tmp_path_factory.mktemp("driver")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    return folder


class Card:
    """The device: what the driver tells of it, and how a run is started that sees it."""

    def __init__(self, driver: Path, folder: Path, start: Callable[..., Wrapped]) -> None:
        self._driver, self._start = driver, start
        self.ledger = folder / "ledger"
        self._log = folder / "ledger.log"
        self._log.touch()
        self.tell(0)

    def tell(self, used: int, claims: dict[int, int] | None = None) -> None:
        """Have the driver say how many GiB are in use, and by which pids."""
        lines = [f"{24 * GIB} {used * GIB}"]
        lines += [f"{pid} {held * GIB}" for pid, held in (claims or {}).items()]
        self._replace("\n".join(lines))

    def hang(self) -> None:
        """Have the driver answer nobody any more."""
        self._replace("hang")

    def _replace(self, text: str) -> None:
        beside = self.ledger.with_suffix(".new")
        beside.write_text(text)
        beside.replace(self.ledger)

    def run(self, *command: str, options: Sequence[str] = ("--ledger", "on")) -> Wrapped:
        """Start a command on a host with this driver."""
        env = {"FAKE_NVML": str(self.ledger), "LD_LIBRARY_PATH": str(self._driver)}
        return self._start(*(command or ("sleep", "60")), options=options, env=env)

    def looks(self, word: str, times: int) -> None:
        """Wait until so many looks began, or are over."""
        by = Deadline.after(10)
        wait_until(lambda: self._log.read_text().count(word) >= times, by, f"{times} {word}")

    def looked(self, run: Wrapped) -> None:
        """Wait until the guardian has heard of the look at the start."""
        self.looks("over", 1)
        wait_until(lambda: len(children(run)) == 1, Deadline.after(10), "only the keeper is left")


def children(run: Wrapped) -> list[str]:
    return Path(f"/proc/{run.guardian}/task/{run.guardian}/children").read_text().split()


@pytest.fixture
def card(nothing_left: None, driver: Path, tmp_path: Path) -> Iterator[Card]:  # noqa: ARG001  (runs around this)
    for start in wrapping(tmp_path):
        yield Card(driver, tmp_path, start)


@pytest.fixture
def stranger(nothing_left: None) -> Iterator[int]:  # noqa: ARG001  (runs around this)
    """A process of no run."""
    with subprocess.Popen(["sleep", "61"]) as process:
        yield process.pid
        process.kill()


def device(run: Wrapped) -> dict[str, Any]:
    (one,) = run.report["devices"]
    return dict(one)


def test_memory_that_comes_back_late_is_waited_for(card: Card) -> None:
    run = card.run()
    card.looked(run)
    card.tell(4, {run.command: 4})
    run.send(signal.SIGTERM)
    card.looks("began", 2)
    assert run.process.poll() is None  # "stopped" is not said yet
    card.tell(0)
    assert run.ended() == 143
    assert device(run)["left"] == []
    assert device(run)["used_after_bytes"] == device(run)["used_before_bytes"] == 0
    assert run.report["clean"]
    assert run.errors == ""


def test_memory_that_does_not_come_back_is_named_at_the_bound(card: Card) -> None:
    run = card.run()
    card.looked(run)
    command = run.command
    card.tell(4, {command: 4})
    began = time.monotonic()
    run.send(signal.SIGTERM)
    assert run.ended() == 143  # the command's own: no process survived
    assert 2 < time.monotonic() - began < 6
    assert [it["pid"] for it in device(run)["left"]] == [command]
    assert not run.report["clean"]
    said = f"device 0: 4.0 GiB not given back in 2.0 s: pid {command}, dead or hidden"
    assert said in run.errors


def test_memory_that_no_process_is_named_for_is_told_by_the_total(card: Card) -> None:
    run = card.run()
    card.looked(run)
    card.tell(3)
    run.send(signal.SIGTERM)
    assert run.ended() == 143
    (left,) = device(run)["left"]
    assert (left["pid"], left["used_bytes"]) == (None, 3 * GIB)
    assert "no process is named for it" in run.errors


def test_what_a_stranger_takes_meanwhile_is_not_ours_to_wait_for(card: Card, stranger: int) -> None:
    run = card.run()
    card.looked(run)
    card.tell(9, {stranger: 9})
    run.send(signal.SIGTERM)
    assert run.ended(2) == 143
    assert device(run)["left"] == []
    assert run.report["clean"]


def test_a_foreign_holder_is_named_at_the_start(card: Card, stranger: int) -> None:
    card.tell(11, {stranger: 11})
    run = card.run()
    run.says("GiB", where=run.err)
    assert (
        run.errors == f"stopbath: device 0: pid {stranger} (sleep 61) holds 11.0 GiB of 24.0 GiB\n"
    )
    run.send(signal.SIGTERM)
    assert run.ended(3) == 143
    assert [it["pid"] for it in device(run)["foreign"]] == [stranger]
    assert run.report["clean"]


def test_what_the_command_itself_holds_already_is_foreign_to_nobody(card: Card) -> None:
    """The first look may come after the command has taken memory: that is no baseline."""
    run = card.run("sh", "-c", f"printf '%s %s\n%s %s' {24 * GIB} {4 * GIB} $$ {4 * GIB} > "
                   "$FAKE_NVML.new; mv $FAKE_NVML.new $FAKE_NVML; exec sleep 60")  # fmt: skip
    card.looked(run)
    card.tell(0)
    run.send(signal.SIGTERM)
    assert run.ended(3) == 143
    assert device(run)["used_before_bytes"] == 0
    assert run.errors == ""


def test_a_driver_that_hangs_at_the_start_holds_nobody_up(card: Card) -> None:
    card.hang()
    run = card.run("sh", "-c", "echo up; read x", options=("--ledger", "on"))
    run.says("up")
    assert run.ended(3) == 1
    assert run.report["devices"] == []
    assert "before the devices were looked at" in run.report["devices_absent"]


def test_a_look_dies_with_a_guardian_that_is_killed(card: Card) -> None:
    card.hang()
    run = card.run()
    card.looks("began", 1)
    pids = [int(pid) for pid in children(run)]
    assert len(pids) == 2
    run.send(signal.SIGKILL)
    assert run.ended() == -9  # and `nothing_left` sees the rest


def test_a_further_signal_ends_the_wait(card: Card) -> None:
    run = card.run()
    card.looked(run)
    card.tell(4, {run.command: 4})
    run.send(signal.SIGTERM)
    card.looks("began", 2)
    began = time.monotonic()
    run.send(signal.SIGINT)
    assert run.ended() == 143
    assert time.monotonic() - began < 1
    assert "further signal" in run.report["devices_absent"]


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ('echo a warning >&2; echo \'{"absent": "x"}\'; echo another >&2', "x"),
        ("echo Traceback; echo OSError: no >&2", "OSError: no"),
        ("exit 1", "the look at the devices gave no answer"),
    ],
)
def test_whatever_a_look_says_beside_its_answer(code: str, answer: str) -> None:
    look = _Look(["/bin/sh", "-c", code], {})
    wait_until(look.read, Deadline.after(5), "it has said all")
    assert look.answer() == {"absent": answer}
    look.end()


def test_a_driver_that_is_not_there_is_said_and_no_error(card: Card) -> None:
    card._driver = Path("/nonexistent")
    run = card.run("sleep", "0.7")
    assert run.ended() == 0
    assert run.report["clean"]
    assert "Shared Library Not Found" in run.report["devices_absent"]
    assert run.errors == ""
