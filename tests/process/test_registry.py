"""A run is registered while it lives, under a lock that is free only when nobody is left."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dead_runs import Place, stopbath
from observing import alive, wait_until
from stopbath.lifecycle import Deadline, ProcessRef, WorkerGroup, WorkerSpec
from stopbath.lifecycle._containment import own_cgroup
from stopbath.lifecycle._runs import registered

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return Place(tmp_path)


def test_a_living_run_is_recorded_with_who_belongs_to_it(place: Place) -> None:
    started = place.start("import os; print(os.getpid(), flush=True); import time; time.sleep(99)")
    try:
        # The command may print before the keeper, which has just started it, writes.
        wait_until(lambda: len(registered()[0][0].processes) == 3, Deadline.after(5))
        (run,), _ = registered()
        assert (run.kind, run.name, run.live) == ("run", "dead", True)
        assert run.argv[0] == sys.executable
        roles = {one.role: one.pid for one in run.processes}
        assert roles["guardian"] == started.front.pid
        assert roles["worker"] == started.pids[0]
        assert alive(roles["keeper"])
    finally:
        started.front.terminate()
        started.front.wait(10)


def test_nothing_is_recorded_of_a_run_that_has_ended(place: Place) -> None:
    """Neither the record nor the directory: what is there tells of something."""
    stopbath(place, "run", "--", "false", code=1)
    with WorkerGroup("g", [WorkerSpec("misbehaving:obedient")]):
        assert len(place.records()) == 1
    assert list(place.path.iterdir()) == []


def test_the_lock_is_held_until_both_holders_are_dead(place: Place) -> None:
    """A guardian that is killed leaves a keeper that cleans up: nobody may sweep beside it."""
    started = place.start()
    (record,) = place.records()
    guardian, keeper = (ProcessRef.open(pid) for pid in place.holders(record))
    try:
        keeper.send(signal.SIGSTOP)
        guardian.send(signal.SIGKILL)
        assert guardian.dead(5)
        (run,), claims = registered(claim_dead=True)
        assert run.live
        assert claims == []
        keeper.send(signal.SIGCONT)
        assert keeper.dead(5)
        assert place.records() == []
        assert not any(alive(pid) for pid in started.pids)
    finally:
        guardian.close()
        keeper.close()
        started.front.wait(5)


def test_no_worker_holds_the_lock(place: Place) -> None:
    with WorkerGroup("g", [WorkerSpec("misbehaving:obedient")]) as group:
        (record,) = place.records()
        (worker,) = group.workers
        held = [str(fd.readlink()) for fd in Path(f"/proc/{worker.pid}/fd").iterdir()]
        assert str(record) not in held
    started = place.start("import os; print(*map(int, os.listdir('/proc/self/fd')), flush=True)")
    started.front.wait(10)
    assert set(started.pids) <= {0, 1, 2, 3}  # 3 is the listing's own


def test_a_forked_child_of_the_program_does_not_hold_the_lock(place: Place) -> None:
    """Or a run would look alive for as long as some pool of the program's."""
    script = """
import os, signal, sys
from stopbath.lifecycle import Deadline, WorkerGroup, WorkerSpec
group = WorkerGroup("g", [WorkerSpec("misbehaving:obedient")])
group.start(); group.wait_ready(Deadline.after(20))
child = os.fork()
if child == 0:  # it says so itself: then what is run in a forked child has run
    print(os.getpid(), flush=True)
while True: signal.pause()
"""
    path = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, sys.path)])
    program = subprocess.Popen(
        [sys.executable, "-c", script],
        env=place.env | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    child = ProcessRef.open(int(program.stdout.readline()))
    program.stdout.close()
    try:
        (record,) = place.records()
        place.die_at_once(record)
        with record.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert not child.dead()
    finally:
        child.send(signal.SIGKILL)
        child.dead(5)
        child.close()
        program.wait(5)
    stopbath(place, "sweep", "--yes")
    assert place.records() == []


@pytest.mark.parametrize("wrong", ["a file", "a symlink", "open to others", "another user's"])
def test_a_directory_that_cannot_be_trusted_is_said_once_and_stops_nothing(
    place: Place, wrong: str
) -> None:
    """Who could write there could have us end what they like."""
    where = place.path / "stopbath"
    if wrong == "a file":
        where.touch()
    elif wrong == "a symlink":
        (place.path / "elsewhere").mkdir(mode=0o700)
        where.symlink_to(place.path / "elsewhere")
    else:
        where.mkdir(mode=0o700)
        where.chmod(0o750)
        if wrong == "another user's":
            if os.geteuid() != 0:
                pytest.skip("only root can make somebody else's directory")
            where.chmod(0o700)
            os.chown(where, 12345, 12345)
    done = stopbath(place, "run", "--", "sh", "-c", "echo ran; exit 7", code=7)
    assert done.stdout == "ran\n"
    assert done.stderr.count("not registered") == 1
    assert place.records() == []


@pytest.mark.skipif(
    own_cgroup() is None or not os.access(own_cgroup() or "", os.W_OK),
    reason="no delegated cgroup v2 on this host",
)
def test_a_worker_sits_in_a_cgroup_of_its_own_before_it_runs(place: Place) -> None:
    """And the cgroups are gone with the run, the one of a run that was killed too."""
    with WorkerGroup("g", [WorkerSpec("misbehaving:obedient", name=n) for n in "ab"]) as group:
        (record,) = place.records()
        homes = {
            Path(f"/proc/{worker.pid}/cgroup").read_text().partition("0::")[2].strip()
            for worker in group.workers
        }
        run_id = place.lines(record)[0]["run_id"]
        assert {home.rpartition("/")[0].rpartition("/")[2] for home in homes} == {
            f"stopbath-{run_id}"
        }
        assert len(homes) == 2
    started = place.start()
    (record,) = place.records()
    (cgroup,) = [line["path"] for line in place.lines(record) if line["t"] == "resource"]
    inside = {
        int(word)
        for leaf in Path(cgroup).glob("*/cgroup.procs")
        for word in leaf.read_text().split()
    }
    assert inside >= set(started.pids)
    started.front.kill()
    started.front.wait(5)
    wait_until(lambda: not Path(cgroup).exists(), Deadline.after(5))
    assert not any(alive(pid) for pid in started.pids)
