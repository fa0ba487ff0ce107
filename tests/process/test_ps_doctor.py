"""ps and doctor as people and programs see them: real processes, plain text, 80 columns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dead_runs import Place, stopbath
from observing import wait_until
from stopbath.lifecycle import Deadline

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    tmp_path.chmod(0o700)
    return Place(tmp_path)


LISTENER = """
import os, socket, subprocess, sys, time
server = socket.create_server(("127.0.0.1", 0))
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
print(os.getpid(), child.pid, server.getsockname()[1], flush=True)
time.sleep(300)
"""


def test_ps_shows_a_run_as_a_tree_with_its_ports(place: Place) -> None:
    started = place.start(LISTENER)
    command, child, port = started.pids
    try:
        said = json.loads(stopbath(place, "ps", "--json").stdout)
        (run,) = said["runs"]
        assert run["live"]
        shown = {one["pid"]: one for one in run["processes"]}
        assert [one["part"] for one in run["processes"]] == [
            "guardian",
            "keeper",
            "worker",
            "child",
        ]
        assert [one["depth"] for one in run["processes"]] == [0, 1, 2, 3]
        assert shown[command]["ports"] == [port]
        assert shown[command]["memory_bytes"] > 1 << 20
        assert child in shown
        lines = stopbath(place, "ps").stdout.splitlines()
        assert max(map(len, lines)) <= 80
        assert any(
            line.split()[:3] == [str(started.front.pid), "guardian", "dead"] for line in lines
        )
        assert any(str(port) in line for line in lines)
    finally:
        started.front.terminate()
        started.front.wait(10)


def test_ps_shows_what_a_dead_run_left(place: Place) -> None:
    left = place.dead_run(LISTENER)
    said = json.loads(stopbath(place, "ps", "--json").stdout)
    (run,) = said["runs"]
    assert not run["live"]
    assert {one["pid"] for one in run["processes"]} == set(left.pids[:2])
    assert all(one["orphan"].startswith("its run is dead") for one in run["processes"])
    assert "DEAD" in stopbath(place, "ps").stdout
    stopbath(place, "sweep", "--yes")


def test_ps_and_sweep_name_an_orphan_of_somebody_elses_and_touch_it_not(place: Place) -> None:
    """It is known by its title: that is enough to show it, and proves nothing."""
    script = (
        "import subprocess; p = subprocess.Popen(['VLLM::EngineCore', '300'], "
        "executable='/bin/sleep', start_new_session=True, stdout=subprocess.DEVNULL); print(p.pid)"
    )
    launcher = [sys.executable, "-c", script]
    pid = int(subprocess.run(launcher, stdout=subprocess.PIPE, text=True, check=True).stdout)
    cmdline = Path(f"/proc/{pid}/cmdline")
    wait_until(lambda: cmdline.read_bytes().startswith(b"VLLM"), Deadline.after(5))
    try:
        said = json.loads(stopbath(place, "ps", "--json").stdout)
        (orphan,) = [one for one in said["foreign"] if one["pid"] == pid]
        assert orphan["part"] == "vLLM"
        assert "launcher is gone" in orphan["orphan"]
        swept = json.loads(stopbath(place, "sweep", "--yes", "--json").stdout)
        assert pid in [one["pid"] for one in swept["orphans_not_touched"]]
        text = stopbath(place, "sweep").stdout
        assert "proves nothing" in text
        assert max(map(len, text.splitlines())) <= 80
        assert cmdline.read_bytes().startswith(b"VLLM")
    finally:
        subprocess.run(["kill", "-KILL", str(pid)], check=True)
        wait_until(
            lambda: not Path(f"/proc/{pid}/maps").exists() or not _maps(pid), Deadline.after(5)
        )


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def test_the_doctor_says_what_this_host_gives(place: Place) -> None:
    said = json.loads(stopbath(place, "doctor", "--json").stdout)
    topics = {one["topic"]: one for one in said["findings"]}
    assert {"subreaper", "cgroup v2", "PID namespace", "PID 1", "shared memory"} <= set(topics)
    assert {"core dumps", "ptrace", "GPU driver", "clocks", "hidepid", "open files"} <= set(topics)
    assert topics["runtime directory"]["level"] == "good"
    assert list(place.path.iterdir()) == []
    text = stopbath(place, "doctor").stdout
    # A path is not broken: it is there to be copied.
    assert max(len(line) for line in text.splitlines() if str(place.path) not in line) <= 80
    for topic in topics:
        assert topic in text


def test_the_doctor_sees_a_directory_that_cannot_be_used(place: Place) -> None:
    (place.path / "stopbath").touch()
    said = json.loads(stopbath(place, "doctor", "--json").stdout)
    (found,) = [one for one in said["findings"] if one["topic"] == "runtime directory"]
    assert found["level"] == "warning"


def test_the_budget_of_a_stop(place: Place) -> None:
    text = stopbath(place, "doctor", "--budget", "--drain", "20", "--grace", "60").stdout
    assert "docker stop allows 10 s, the worst case takes 25 s: cut off in drain" in text
    assert "ok    yours allows 60 s" in text
    assert max(map(len, text.splitlines())) <= 80
    said = json.loads(stopbath(place, "doctor", "--budget", "--json").stdout)
    assert [it["name"] for it in said["phases"]] == ["drain", "SIGTERM", "SIGKILL", "report"]
    assert "--drain" in stopbath(place, "doctor", "--budget", "--drain", "nan", code=2).stderr
