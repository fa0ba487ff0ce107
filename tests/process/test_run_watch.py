"""`stopbath run`: strays, --linger, --watch, --isolate pid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from observing import alive, wait_until
from stopbath.lifecycle import Deadline
from stopbath.lifecycle._containment import own_cgroup
from wrapped import Holdings, Wrapped, wrapping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("nothing_left")

QUICK = ("--drain", "0.3", "--terminate", "0.3", "--kill", "2")
ROOT = os.geteuid() == 0


@pytest.fixture
def wrap(nothing_left: None, tmp_path: Path) -> Iterator[Callable[..., Wrapped]]:  # noqa: ARG001  (runs around this)
    yield from wrapping(tmp_path)


def python(code: str, *args: str) -> tuple[str, ...]:
    return (sys.executable, "-u", "-c", textwrap.dedent(code), *args)


# An engine: ranks with titles of their own, which it does not look after.
ENGINE = """
import os, signal, subprocess, sys, time
def rank(i):
    return subprocess.Popen(["bash", "-c", f"exec -a RANK::worker_{i} sleep 60"])
if "late" in sys.argv: time.sleep(0.3)
ranks = [rank(i) for i in range(2)]
if "polite" in sys.argv:
    def end(*_):
        for rank in ranks: rank.kill(); rank.wait()
        if "slow" in sys.argv: time.sleep(0.6)
        os._exit(0)
    signal.signal(signal.SIGTERM, end)
print("up", *(rank.pid for rank in ranks), flush=True)
if "replaces" in sys.argv:
    ranks[0].wait()
    print("replaced", rank(2).pid, flush=True)
while True: signal.pause()
"""


# -- strays


@pytest.mark.parametrize(
    ("stray", "outcome"),
    [
        ("sleep 60 &", "terminated"),
        ("setsid sleep 60 &", "terminated"),
        ("setsid sh -c 'sleep 60 & exit'; ", "terminated"),
        ("setsid sh -c 'trap \"\" TERM; echo deaf; while :; do sleep 1; done' & read x;", "killed"),
    ],
)
def test_what_the_command_leaves_is_ended_and_named(
    wrap: Callable[..., Wrapped], stray: str, outcome: str
) -> None:
    run = wrap("sh", "-c", f"{stray} exit 3", options=QUICK, stdin=subprocess.PIPE)
    assert run.process.stdin is not None
    if outcome == "killed":
        run.says("deaf")
    run.process.stdin.close()
    assert run.ended() == 3
    assert outcome in {it["outcome"] for it in run.report["strays"]}
    assert "stray" in run.errors


@pytest.mark.skipif(not ROOT, reason="has a user who may not signal another")
@pytest.mark.parametrize("cgroup", ["a cgroup", ""])
def test_what_is_another_users_is_named_and_stops_nothing_else(
    wrap: Callable[..., Wrapped], cgroup: str
) -> None:
    """As after sudo: a cgroup ends it all the same; without one it stays, and the run says so."""
    blind = () if cgroup else (
        "unshare", "-m", "sh", "-c", 'mount -t tmpfs none /sys/fs/cgroup; exec "$@"', "sh",
    )  # fmt: skip
    powerless = ("setpriv", "--bounding-set", "-kill", "--inh-caps", "-kill")
    code = "setsid setpriv --reuid 65534 --clear-groups sleep 3 & setsid sleep 60 & "
    code += "echo up $!; read x"
    run = wrap("sh", "-c", code, options=("--terminate", "0.3", "--kill", "0.3"),
               before=(*blind, *powerless), stdin=subprocess.PIPE)  # fmt: skip
    run.says("up")
    wait_until(lambda: _anothers(run), Deadline.after(5), "one is another user's")
    assert run.process.stdin is not None
    run.process.stdin.close()
    own = own_cgroup()
    gone = bool(cgroup) and own is not None and os.access(own, os.W_OK)
    assert run.ended() == (1 if gone else 125)
    assert not alive(int(run.out.read_text().split()[1]))  # our own was ended
    survivors = run.report["survivors"]
    if gone:
        assert survivors == []
    else:
        assert [it["name"] for it in survivors] == ["sleep 3"]
        assert "sleep 3 of user 65534: not ours to signal" in run.errors


def _anothers(run: Wrapped) -> bool:
    return any(Path(f"/proc/{pid}").stat().st_uid == 65534 for pid in Holdings.of(run).pids)


def test_linger_lets_a_program_daemonise_on_purpose(
    wrap: Callable[..., Wrapped], tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    run = wrap("sh", "-c", f"setsid sh -c 'sleep 0.4; touch {mark}' & exit 0",
               options=("--linger", "20"))  # fmt: skip
    began = time.monotonic()
    assert run.ended() == 0
    assert mark.exists()
    assert time.monotonic() - began < 10  # over when the last of them is


# -- watch


def test_a_rank_that_dies_ends_a_command_that_does_not_notice(
    wrap: Callable[..., Wrapped],
) -> None:
    run = wrap(*python(ENGINE, "polite"), options=(*QUICK, "--watch", "RANK::worker:2"))
    run.says("up")
    ranks = [int(word) for word in run.out.read_text().split()[1:]]
    held = Holdings.of(run)
    wait_until(lambda: _holds(run.guardian, ranks), Deadline.after(5), "both are watched")
    began = time.monotonic()
    os.kill(ranks[0], signal.SIGKILL)
    run.says("lost --watch RANK::worker:2", where=run.err)
    noticed_s = time.monotonic() - began
    assert run.ended() == 125  # the command itself said 0
    assert noticed_s < 1
    assert "RANK::worker:2" in run.report["cause"]["what"]
    assert str(ranks[0]) in run.report["cause"]["what"]
    held.are_gone(2)


def _holds(guardian: int, pids: list[int]) -> bool:
    """Whether the guardian has a pidfd of each."""
    held = set()
    for name in os.listdir(f"/proc/{guardian}/fdinfo"):  # noqa: PTH208
        try:
            with open(f"/proc/{guardian}/fdinfo/{name}") as file:  # noqa: PTH123
                held |= {int(line[4:]) for line in file if line.startswith("Pid:")}
        except OSError:
            continue
    return held >= set(pids)


def _title(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
        return file.read().partition(b"\0")[0]


def test_a_rank_that_was_replaced_in_time_is_no_fault(wrap: Callable[..., Wrapped]) -> None:
    run = wrap(*python(ENGINE, "replaces"), options=("--watch", "RANK::worker:2"))
    run.says("up")
    ranks = [int(word) for word in run.out.read_text().split()[1:]]
    wait_until(lambda: _holds(run.guardian, ranks), Deadline.after(5), "both are watched")
    run.send(signal.SIGSTOP)  # however slow this machine is: it hears of both at once
    os.kill(ranks[0], signal.SIGKILL)
    run.says("replaced")
    second = int(run.out.read_text().split()[-1])
    wait_until(lambda: b"RANK" in _title(second), Deadline.after(5), "it has its title")
    run.send(signal.SIGCONT)
    wait_until(lambda: _holds(run.guardian, [second]) or not alive(run.command), Deadline.after(5))
    assert alive(run.command)
    run.send(signal.SIGTERM)
    assert run.ended() == 143
    assert run.report["cause"] is None


def test_what_does_not_come_to_live_in_time_ends_the_run(wrap: Callable[..., Wrapped]) -> None:
    options = (*QUICK, "--watch", "RANK::worker:3", "--watch-within", "0.7")
    run = wrap(*python(ENGINE), options=options)
    assert run.ended() == 143
    assert "has 2 of --watch RANK::worker:3 after 0.7 s" in run.errors


def test_what_comes_late_is_waited_for(wrap: Callable[..., Wrapped]) -> None:
    run = wrap(*python(ENGINE, "late"), options=("--watch", "RANK::worker:2"))
    run.says("up")
    run.send(signal.SIGTERM)
    assert run.ended() == 143
    assert run.report["cause"] is None


def test_a_stop_that_was_asked_for_is_no_fault_of_a_watched_process(
    wrap: Callable[..., Wrapped],
) -> None:
    run = wrap(*python(ENGINE, "polite", "slow"), options=("--watch", "RANK::worker:2"))
    run.says("up")
    ranks = [int(word) for word in run.out.read_text().split()[1:]]
    wait_until(lambda: _holds(run.guardian, ranks), Deadline.after(5), "both are watched")
    run.send(signal.SIGTERM)
    assert run.ended() == 0
    assert run.errors == ""
    assert run.report["clean"]


@pytest.fixture
def device_file() -> Iterator[str]:
    """A file that is called like a device's, and that no driver is behind."""
    path = f"/dev/nvidia-of-a-test-{os.getpid()}"
    with open(path, "wb"):  # noqa: PTH123
        pass
    yield path
    os.unlink(path)  # noqa: PTH108


@pytest.mark.skipif(not ROOT, reason="makes a file in /dev")
def test_the_last_holder_of_a_device_that_dies_ends_the_run(
    wrap: Callable[..., Wrapped], device_file: str
) -> None:
    """The engine is told by what it has open: a title tells nothing of it."""
    code = f"sleep 60 3<{device_file} & echo up $!; while :; do sleep 1; done"
    run = wrap("bash", "-c", code, options=(*QUICK, "--watch", "device"))
    run.says("up")
    holder = int(run.out.read_text().split()[1])
    wait_until(lambda: _holds(run.guardian, [holder]), Deadline.after(5), "it is watched")
    os.kill(holder, signal.SIGKILL)
    assert run.ended() == 143  # bash, by the SIGTERM of the stop
    assert "lost --watch device:1: the last holder died" in run.errors
    assert "the last holder died" in run.report["cause"]["what"]


def test_no_holder_of_a_device_in_time_ends_the_run(wrap: Callable[..., Wrapped]) -> None:
    run = wrap("sleep", "60", options=(*QUICK, "--watch", "device", "--watch-within", "0.3"))
    assert run.ended() == 143
    assert "has 0 of --watch device:1 after 0.3 s" in run.errors


# -- isolate


@pytest.mark.skipif(not ROOT, reason="a PID namespace needs root")
def test_in_a_namespace_even_both_killed_at_once_leave_nothing(
    wrap: Callable[..., Wrapped],
) -> None:
    code = """
        import os, signal
        for _ in range(2):
            if os.fork() == 0:
                os.setsid()
                if os.fork():
                    os._exit(0)
                break
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("up", flush=True)
        while True: signal.pause()
    """
    run = wrap(*python(code), options=("--isolate", "pid"))
    wait_until(lambda: run.out.read_text().count("up") == 3, Deadline.after(10))
    held = Holdings.of(run)
    pids = run.guardian, run.keeper
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert run.ended() == -9
    held.are_gone(2)


@pytest.mark.skipif(not ROOT, reason="a PID namespace needs root")
def test_numbers_in_the_report_are_those_outside(wrap: Callable[..., Wrapped]) -> None:
    run = wrap("sh", "-c", "setsid sleep 60 & echo inside $$; read x",
               options=("--isolate", "pid"), stdin=subprocess.PIPE)  # fmt: skip
    run.says("inside")
    inside = int(run.out.read_text().split()[1])
    command = run.command
    assert inside < command
    assert run.process.stdin is not None
    run.process.stdin.close()
    assert run.ended() == 1  # nothing to read
    assert run.report["workers"][0]["pid"] == command
    assert all(it["pid"] > inside for it in run.report["strays"])


@pytest.mark.skipif(not ROOT, reason="drops its privilege to see what follows")
def test_without_privilege_it_says_so_in_one_line(wrap: Callable[..., Wrapped]) -> None:
    run = wrap("true", options=("--isolate", "pid"),
               before=("setpriv", "--bounding-set", "-all", "--inh-caps", "-all"))  # fmt: skip
    assert run.ended() == 125
    said = "--isolate pid is not possible here: unshare: Operation not permitted; it needs"
    assert run.errors == f"stopbath: {said} CAP_SYS_ADMIN\n"
