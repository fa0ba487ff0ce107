"""The fault matrix, played once, and the drill's own honesty.

Every scenario is a test of its own here, so that a failure names it; they are all played in one
run of the drill, several at a time.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from stopbath.drill.catalog import ABSENT, KINDS, SCENARIOS
from stopbath.drill.scenario import FACES
from stopbath.drill.soaked import plan_of
from stopbath.drill.starts import start_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(420)

JOBS = 3  # they wait more than they work
CONTROLS = {(it.injection, it.face): it.id for it in reversed(SCENARIOS)}


def drill(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stopbath", "drill", *args],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        check=False,
        timeout=400,
    )


@functools.cache
def played() -> dict[tuple[str, str, bool], dict[str, Any]]:
    """Play everything; by id, face and whether it is a control."""
    done = drill("--json", "--jobs", str(JOBS))
    assert done.stdout, done.stderr
    results = json.loads(done.stdout)["results"]
    return {(it["id"], it["face"], it["control"]): it for it in results}


@pytest.mark.parametrize("ident", [it.id for it in SCENARIOS])
def test_nothing_is_left(ident: str) -> None:
    """The fault took effect, what is promised came true, and all is as before, for good."""
    (result,) = (it for key, it in played().items() if key[0] == ident and not key[2])
    if result["state"] == "absent":
        pytest.skip(result["problems"][0])
    assert result["state"] == "ok", f"{result['title']}: {result['left']} {result['problems']}"
    assert result["left"] == {}
    if result["took_s"] > result["bound_s"]:  # beside others it measures the machine, too
        alone = json.loads(drill("--json", "--jobs", "1", "--only", ident).stdout)["results"]
        (result,) = (it for it in alone if not it["control"])
    assert result["state"] == "ok"
    assert result["took_s"] <= result["bound_s"]


@pytest.mark.parametrize("ident", sorted(CONTROLS.values()))
def test_a_control_does_not_verify(ident: str) -> None:
    """The same scenario with its injection aimed at nothing: a drill that cannot fail is none."""
    found = [it for key, it in played().items() if key[0] == ident and key[2]]
    if not found:
        pytest.skip("not applicable here")
    assert [it["state"] for it in found] == ["unverified"]


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_played_or_its_absence_explained(kind: str, face: str) -> None:
    played_ones = [it for it in SCENARIOS if (it.kind, it.face) == (kind, face)]
    reasons = [it.reason for it in ABSENT if (it.kind, it.face) == (kind, face)]
    assert bool(played_ones) != bool(reasons)


def test_ids_are_unique_and_titles_fit_the_list() -> None:
    ids = [it.id for it in SCENARIOS]
    assert len(set(ids)) == len(ids)


def test_list_says_what_there_is() -> None:
    done = drill("--list")
    assert done.returncode == 0
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    assert all(it.id in done.stdout for it in SCENARIOS)
    told = json.loads(drill("--list", "--json", "--face", "run").stdout)
    assert {it["face"] for it in told["scenarios"]} == {"run"}
    assert {it["id"] for it in told["scenarios"]} == {it.id for it in SCENARIOS if it.face == "run"}


def test_one_is_played_alone_and_the_table_fits_80_columns() -> None:
    done = drill("--only", "F28c", "--repeat", "2")
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("F28c run ") for line in lines) == 2
    assert "1 controls (injection aimed at nothing): none passed" in done.stdout


@pytest.mark.parametrize("args", [("--only", "F99"), ("--face", "hands"), ("--repeat", "0")])
def test_what_is_not_there_is_a_usage_error(args: tuple[str, ...]) -> None:
    done = drill(*args)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_a_leak_is_named_and_gives_a_code(tmp_path: Path) -> None:
    """Every command of this drill leaves a file in its temporary directory."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'stopbath.drill.commands' in sys.orig_argv:\n"
        "    open(os.path.join(os.environ['TMPDIR'], 'leak'), 'w').close()\n"
    )
    done = drill("--only", "F01e", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "left behind: files:" in done.stdout
    assert "/runtime/leak" in done.stdout


def test_device_memory_that_nobody_waits_for_and_nobody_names_is_told(tmp_path: Path) -> None:
    """A look that neither waits nor sees strangers: it is the product's own that is drilled."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'stopbath.devices.look' in sys.orig_argv:\n"
        "    from stopbath.devices import account\n"
        "    from stopbath.lifecycle import Deadline\n"
        "    before, settle = account.look_before, account.settle\n"
        "    account.look_before = lambda *args: before(*args) | {'foreign': []}\n"
        "    account.settle = lambda *args, **how: settle(*args[:4], Deadline.after(0), **how)\n"
    )
    asked = ("--only", "F07d", "--only", "F07f", "--only", "F07h")
    done = drill("--json", *asked, PYTHONPATH=str(tmp_path))
    found = [it for it in json.loads(done.stdout)["results"] if it["simulated"]]
    states = {it["id"]: it["state"] for it in found if not it["control"]}
    assert states.pop("F07d", "wrong") == "wrong"  # a real device may be back by itself
    assert states == {"F07f": "wrong", "F07h": "wrong"}
    assert {it["state"] for it in found if it["control"]} == {"unverified"}


def test_the_table_says_what_is_simulated_and_why() -> None:
    done = drill("--only", "F07h")
    assert done.returncode == 0, done.stdout
    assert "F07h run     simulated device: " in done.stdout
    assert "on a simulated device (whom a real driver names depends on the host): F07h" in (
        done.stdout
    )


def test_a_soak_replays_its_choices() -> None:
    """The plan of a cycle depends on seed and number, and on nothing else."""
    assert [plan_of(7, n) for n in range(50)] == [plan_of(7, n) for n in range(50)]
    assert plan_of(7, 1) != plan_of(8, 1)
    first, second = (
        subprocess.run(
            [sys.executable, "-m", "stopbath.drill.soak", "--plans", "--cycles", "20"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": hashing},
        ).stdout
        for hashing in ("1", "2")
    )
    assert first == second


def test_a_short_soak_leaves_nothing() -> None:
    done = drill("--soak", "12", "--seed", "3")
    assert done.returncode == 0, done.stdout
    assert "left behind: 0 (goal 0)" in done.stdout


def starts(*args: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "stopbath.drill.starts", *args]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_starts_that_are_hit_replay_their_choices_and_leave_nothing() -> None:
    """Every face, hit between 0 and 3 s after its start; `make starts` plays 300."""
    plans = [start_of(0, run) for run in range(300)]
    assert {(it.face, it.victim) for it in plans} == {
        *(("library", who) for who in ("front", "keeper", "w0")),
        *(("serve", who) for who in ("front", "keeper", "server", "rank0")),
        *(("run", who) for who in ("front", "keeper", "command")),
    }
    assert {it.number for it in plans} == {2, 9, 15}
    assert starts("--plans", "--runs", "300").stdout.splitlines() == [
        f"{run}: {it}" for run, it in enumerate(plans)
    ]
    done = starts("--runs", "8", "--seed", "5")
    assert done.returncode == 0, done.stdout
    assert "left something behind: 0 (goal 0)" in done.stdout


def test_a_start_that_leaves_something_is_told(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if '_keeper.py' not in sys.orig_argv[-1] and 'TMPDIR' in os.environ:\n"
        "    open(os.path.join(os.environ['TMPDIR'], 'leak'), 'w').close()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    argv = [sys.executable, "-m", "stopbath.drill.starts", "--run", "0"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 1
    assert "left something behind: 1 (goal 0)" in done.stdout
    assert "/leak" in done.stdout
