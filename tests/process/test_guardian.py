"""The outermost process: every signal, every death, one report, one exit code, nothing left.

The guardian is run by path, as `serve` does, over `misbehaving.serves_ranks` as its server.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest

from observing import FREEZER, frozen, run_processes, state_of, wait_until
from stopbath.lifecycle import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from guarded import Run

pytestmark = pytest.mark.usefixtures("nothing_left")

# -- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_drains(guard: Callable[..., Run], number: int) -> None:
    run = guard()
    run.kill("guardian", number)
    assert run.ended() == 0
    assert run.outcomes() == {"server": "drained", "rank0": "drained", "rank1": "drained"}
    report = run.report
    assert report["schema"] == "stopbath.shutdown/1"
    assert report["clean"]
    assert report["cause"] is None
    assert report["asked_by"] == signal.Signals(number).name
    assert report["exit_code"] == 0
    assert {worker["pid"] for worker in report["workers"]} == {
        run.pids[who] for who in ("server", "rank0", "rank1")
    }
    assert any("stopped in" in line for line in run.said)


def test_ranks_that_ignore_everything_are_killed_within_the_servers_graces(
    guard: Callable[..., Run],
) -> None:
    """And what they left outside of session and tree is gone with them."""
    run = guard(ranks="leaves_strays")
    assert len(run.strays) == 2
    run.kill("rank0", signal.SIGSTOP)
    run.kill("guardian", signal.SIGTERM)
    assert run.ended() == 0
    assert run.outcomes()["rank0"] == "terminated"
    assert {stray["pid"] for stray in run.report["strays"]} >= set(run.strays)


# Answers the look at the start with a holder, and the one at the end with what is left.
_DRIVER = """
import json, sys
asked = json.load(sys.stdin)
device = {"number": 0, "uuid": "u", "total_bytes": 24 << 30, "visible": True}
left = {"pid": min(asked.get("ours", [0])), "used_bytes": 4 << 30, "why": "dead", "proved": True}
holder = {"device": 0, "pid": 7, "used_bytes": 20 << 30, "command": "other"}
answer = {"devices": [device], "foreign": [holder]}
if "before" in asked:
    assert asked["before"] == answer
    answer = {"devices": [device | {"left": [left], "waited_s": 2.0}]}
print(json.dumps(answer))
"""


def test_who_holds_device_memory_before_and_after_is_named(guard: Callable[..., Run]) -> None:
    """The end of the server is its own: memory that is left is no process that is."""
    run = guard(ledger=(sys.executable, "-c", _DRIVER))
    if not any("holds 20.0 GiB" in line for line in run.said):
        run.hear("stopbath: device 0: pid 7 (other) holds 20.0 GiB of 24.0 GiB")
    run.kill("guardian", signal.SIGTERM)
    assert run.ended() == 0
    pid = min(run.pids[who] for who in ("server", "rank0", "rank1"))
    assert f"stopbath:   device 0: 4.0 GiB not given back in 2.0 s: pid {pid}, dead" in run.said
    assert not run.report["clean"]
    assert run.report["devices"][0]["left"][0]["pid"] == pid


def test_sighup_that_was_ignored_at_the_start_stays_ignored(guard: Callable[..., Run]) -> None:
    run = guard(wrapper=("nohup",))
    for who in ("guardian", "keeper"):
        run.kill(who, signal.SIGHUP)
    run.kill("guardian", signal.SIGTERM)
    assert run.ended() == 0
    assert run.report["asked_by"] == "SIGTERM"
    assert run.report["clean"]


@pytest.mark.parametrize("numbers", [(15, 2), (2, 2), (1, 15), (3, 3)])
def test_a_second_signal_stops_now(guard: Callable[..., Run], numbers: tuple[int, int]) -> None:
    """A server that drains for a minute is cut short; the code says that it was forced."""
    run = guard(ranks="deaf", graces=(60.0, 0.3, 1.0), outer=(66.0, 2.5, 1.0))
    began = time.monotonic()
    run.kill("guardian", numbers[0])
    run.hear("stopbath: SIG")
    run.kill("guardian", numbers[1])
    assert run.ended() in {128 + numbers[1], 0 if numbers[0] == 3 else 128 + numbers[1]}
    assert time.monotonic() - began < 5


def test_a_third_signal_kills_now(guard: Callable[..., Run]) -> None:
    """A server that hears nothing goes at once; the keeper takes its ranks with it."""
    run = guard(ranks="deaf", graces=(60.0, 60.0, 1.0), outer=(130.0, 66.0, 1.0))
    run.kill("server", signal.SIGSTOP)
    wait_until(lambda: state_of(run.pids["server"]) == "T", Deadline.after(5))
    began = time.monotonic()
    for number in (2, 2, 15):
        run.kill("guardian", number)
        run.hear("stopbath: SIG")
    assert run.ended() == 128 + 15
    assert time.monotonic() - began < 2
    assert run.outcomes() == {"server": "killed", "rank0": "killed", "rank1": "killed"}


def test_any_number_of_signals_is_harmless(guard: Callable[..., Run]) -> None:
    run = guard(ranks="deaf")
    for number in itertools.islice(itertools.cycle((2, 15, 1, 3, 10, 12, 28)), 300):
        try:
            run.kill("guardian", number)
        except ProcessLookupError:
            break
    assert run.ended() in {128 + n for n in (1, 2, 3, 15)}


@pytest.mark.parametrize("ranks", ["deaf", "in_a_c_call"])
def test_sigquit_stops_now_with_the_stacks_of_the_ranks(
    guard: Callable[..., Run], ranks: str
) -> None:
    """Of a rank whose interpreter is locked too; on stderr, and in the report."""
    run = guard(ranks=ranks, graces=(60.0, 0.3, 1.0), outer=(66.0, 2.5, 1.0))
    run.kill("guardian", signal.SIGQUIT)
    assert run.ended() == 0
    workers = {worker["name"]: worker["last_stderr"] for worker in run.report["workers"]}
    for rank in ("rank0", "rank1"):
        said = [line for line in run.said if line.startswith(f"[{rank}] ")]
        assert any(line.endswith(f"in {ranks}") for line in said)
        assert any(line.endswith(f"in {ranks}") for line in workers[rank])
    assert any(line.endswith("in serves_ranks") for line in run.said)  # the server, too
    assert {run.outcomes()[rank] for rank in ("rank0", "rank1")} == {"killed"}


def test_sigquit_harms_nobody_who_cannot_write_stacks(guard: Callable[..., Run]) -> None:
    """A rank that put the signal back to its default is ended by the stop, not by it."""
    run = guard(ranks="dies_of_sigquit")
    run.kill("guardian", signal.SIGQUIT)
    assert run.ended() == 0
    assert run.outcomes()["rank0"] == "terminated"
    assert run.report["cause"] is None


def test_a_hung_server_is_ended_by_the_guardians_own_deadline(guard: Callable[..., Run]) -> None:
    run = guard("deaf_while_starting", outer=(0.3, 0.3, 1.0))
    run.hear("deaf")
    run.kill("guardian", signal.SIGTERM)
    assert run.ended() == 1
    assert run.outcomes() == {"server": "killed"}


def test_signals_for_the_keeper_alone_do_nothing(guard: Callable[..., Run]) -> None:
    """A service manager may send its SIGTERM to every process of the unit."""
    run = guard()
    for number in (1, 2, 3, 15):
        run.kill("keeper", number)
    run.kill("guardian", signal.SIGTERM)
    assert run.ended() == 0
    assert run.report["clean"]


@pytest.mark.parametrize("number", [2, 15])
def test_a_stop_during_the_start(guard: Callable[..., Run], number: int) -> None:
    run = guard("never_ready", outer=(1.0, 1.0, 1.0))
    wait_until(lambda: len(run_processes()) > 2, Deadline.after(10))
    run.kill("guardian", number)
    assert run.ended() == 0


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05, 0.1, 0.2])
def test_a_stop_at_any_instant_of_the_start(guard: Callable[..., Run], delay_s: float) -> None:
    """The delay sweeps over the start; before the guardian's first line the kernel ends it."""
    run = guard("obedient", outer=(1.0, 1.0, 1.0))
    time.sleep(delay_s)
    run.kill("guardian", signal.SIGTERM)
    assert run.ended() in {0, -signal.SIGTERM}


# -- ends that nobody asked for


def test_a_server_that_cannot_start(guard: Callable[..., Run]) -> None:
    run = guard("raises_before_ready")
    assert run.ended() == 1  # its own code; `serve` gives 3
    cause = run.report["cause"]
    assert cause["worker"] == "server"
    assert "no such checkpoint" in cause["what"]
    assert any("cannot open the checkpoint" in line for line in cause["last_stderr"])


def test_a_server_killed_while_it_starts(guard: Callable[..., Run]) -> None:
    run = guard("dies_while_starting")
    assert run.ended() == 3


@pytest.mark.parametrize("who", ["server", "rank0", "keeper"])
def test_one_that_is_killed(guard: Callable[..., Run], who: str) -> None:
    """Code 4, the cause named, nothing left: no stray, no rank."""
    run = guard(ranks="leaves_strays")
    run.kill(who)
    assert run.ended() == 4
    report = run.report
    assert not report["clean"]
    assert report["exit_code"] == 4
    assert report["cause"]["worker"] == {"rank0": "rank0"}.get(who, "server")
    assert set(run.outcomes()) == {"server", "rank0", "rank1"}
    assert "survived" not in run.outcomes().values()


def test_a_guardian_that_is_killed(guard: Callable[..., Run]) -> None:
    """The keeper ends everything, and writes the report that the guardian no longer can."""
    run = guard(ranks="leaves_strays")
    run.kill("guardian")
    assert run.ended() == -signal.SIGKILL
    assert run.report["cause"]["worker"] == "guardian"
    assert run.outcomes() == dict.fromkeys(("server", "rank0", "rank1"), "killed")


@pytest.mark.parametrize(
    "pair", list(itertools.permutations(["guardian", "keeper", "server", "rank0"], 2)), ids="-".join
)
def test_any_two_killed_shortly_after_each_other(
    guard: Callable[..., Run], pair: tuple[str, str]
) -> None:
    run = guard(ranks="leaves_strays")
    run.kill(pair[0])
    time.sleep(0.03)  # the promise is about 20 ms and more
    with contextlib.suppress(ProcessLookupError):  # the first death has ended it already
        run.kill(pair[1])
    code = run.ended()
    assert code == (4 if run.process.returncode >= 0 else -signal.SIGKILL)


def test_everything_deaf_and_the_server_killed_in_the_middle_of_a_stop(
    guard: Callable[..., Run],
) -> None:
    run = guard(ranks="deaf", graces=(60.0, 60.0, 1.0), outer=(130.0, 66.0, 1.0))
    run.kill("guardian", signal.SIGTERM)
    run.hear("stopbath: SIG")
    run.kill("server")
    run.ended()
    assert run.outcomes()["rank0"] == run.outcomes()["rank1"] == "killed"


# -- what cannot be ended

freezer = pytest.mark.skipif(
    not (os.geteuid() == 0 and FREEZER.is_dir()), reason="no v1 freezer cgroup here"
)


@freezer
@pytest.mark.parametrize("killed", [(), ("server",), ("rank1",)])
def test_a_rank_that_survives_is_named_and_gives_code_5(
    guard: Callable[..., Run], killed: tuple[str, ...]
) -> None:
    """Whether the server told of it or was killed itself; the guardian leaves all the same."""
    run = guard(graces=(0.2, 0.2, 0.3), outer=(2.0, 1.0, 0.5))
    with frozen(run.pids["rank0"]):
        began = time.monotonic()
        for who in killed:
            run.kill(who)
        if not killed:
            run.kill("guardian", signal.SIGTERM)
        assert run.process.stderr is not None
        code = run.process.wait(12)
        assert code == 5
        # Who had its SIGKILL from the server is not waited for again: 0.7 s of graces.
        assert time.monotonic() - began < (3.0 if killed == ("server",) else 1.6)
        survivors = {survivor["pid"] for survivor in run.report["survivors"]}
        assert survivors == {run.pids["rank0"]}
        assert run.outcomes()["rank0"] == "survived"
        assert not run.report["clean"]
    wait_until(lambda: not run_processes(), Deadline.after(3), "the keeper left with the last")


# -- the report


def test_a_report_that_cannot_be_written_changes_no_exit_code(
    guard: Callable[..., Run], tmp_path: Path
) -> None:
    run = guard(report=tmp_path / "no" / "such" / "folder.json")
    run.kill("guardian", signal.SIGTERM)
    assert run.ended() == 0
    assert any("report could not be written" in line for line in run.said)


def test_nobody_reads_its_standard_error(guard: Callable[..., Run]) -> None:
    """The terminal is gone; the stop and the report are not (F23)."""
    run = guard()
    assert run.process.stderr is not None
    run.process.stderr.close()
    run.kill("guardian", signal.SIGTERM)
    assert run.process.wait(5) == 0
    assert run.report["clean"]


def test_only_one_file_is_written(guard: Callable[..., Run], tmp_path: Path) -> None:
    run = guard()
    run.kill("guardian", signal.SIGTERM)
    run.ended()
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
