"""`adopt`: processes that somebody else started, under the same escalation and report."""

from __future__ import annotations

import subprocess
import threading
from typing import TYPE_CHECKING, Any

import pytest

from stopbath.lifecycle import Deadline, Escalation, Existing, WorkerGroup, adopt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("nothing_left")

QUICK = Escalation(drain_s=0.3, terminate_s=0.3, kill_s=2.0)
DEAF = "trap '' TERM; echo deaf; while :; do sleep 60; done"


@pytest.fixture
def shell() -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Start a shell that has said a word, so that what it traps is trapped."""
    running: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> subprocess.Popen[bytes]:
        # A session of its own, so that what its death leaves can be ended with its group.
        process = subprocess.Popen(
            ["sh", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        running.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in running:
        subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def _outcomes(group: WorkerGroup) -> list[str]:
    report = group.shutdown(Deadline.after(5))
    return [worker.outcome for worker in report.workers]


def test_each_ends_by_the_step_it_understands(
    shell: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    """One is asked, one gets SIGTERM, one SIGKILL; their own objects know how they ended."""

    def ask(process: Any) -> None:
        process.stdin.close()

    asked, plain, deaf = (
        shell(code) for code in ("echo; read _; exit 0", "echo; exec sleep 60", DEAF)
    )
    group = adopt([Existing(asked, ask=ask), plain, deaf], escalation=QUICK)
    assert _outcomes(group) == ["drained", "terminated", "killed"]
    assert (plain.returncode, deaf.returncode) == (-15, -9)


def test_a_death_is_a_fault_and_ends_the_others(
    shell: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    """The death of an adopted process is told at once, and its peers end with it."""
    first, second = shell("echo; exec sleep 60"), shell("echo; exec sleep 60")
    group = adopt([first, second], escalation=QUICK)
    told = threading.Event()
    group.on_failure(lambda _: told.set())
    first.kill()
    assert told.wait(5)
    assert _outcomes(group) == ["exited", "terminated"]
    assert group.cause is not None
    assert group.cause.pid == first.pid


def test_a_question_that_raises_goes_on_to_sigterm(
    shell: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    """An error while asking one never stops the others, and is in the report."""

    def ask(_: Any) -> None:
        raise OSError("the queue is gone")

    group = adopt([Existing(shell("echo; exec sleep 60"), ask=ask)], escalation=QUICK)
    report = group.shutdown(Deadline.after(5))
    assert report.workers[0].outcome == "terminated"
    assert "the queue is gone" in str(report.workers[0].steps[0].error)


def test_one_that_is_dead_already_is_a_fault(
    shell: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    """A process that ended before it was adopted is named as the cause, not waited for."""
    dead, living = shell("echo"), shell("echo; exec sleep 60")
    dead.wait()
    group = adopt([dead, living], escalation=QUICK)
    assert _outcomes(group)[1] == "terminated"
    assert group.cause is not None
    assert group.cause.worker == f"pid{dead.pid}"


def test_one_that_was_never_started_is_refused() -> None:
    """There is nothing to adopt in a process object without a pid."""
    from multiprocessing import get_context

    with pytest.raises(ValueError, match="has not been started"):
        adopt([get_context("spawn").Process(target=print)])
