"""What a dead run left is ended by identity, and nothing else is touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dead_runs import Place, kill_at_once, stopbath
from observing import FREEZER, alive, frozen, wait_until
from stopbath.lifecycle import Deadline, ProcessRef, WorkerGroup, WorkerSpec, _leftovers, _sweep
from stopbath.lifecycle._leftovers import Left, leftovers
from stopbath.lifecycle._process import read_stat
from stopbath.lifecycle._registry import Record
from stopbath.lifecycle._runs import Claim, registered
from stopbath.lifecycle._sweep import _end, sweep

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return Place(tmp_path)


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """Somebody's process, which no sweep may touch."""
    with subprocess.Popen(["sleep", "300"]) as process:
        yield process
        process.kill()


def claimed() -> Claim:
    _, (claim,) = registered(claim_dead=True)
    return claim


def record_of(run_id: str, *processes: tuple[str, int, int]) -> None:
    """Leave the record of a run that is dead by now."""
    record = Record.create(run_id, "run", "made up", ["x"])
    for role, pid, start in processes:
        record.note_process(role, role, pid, start)
    without_us(record)


def without_us(record: Record) -> None:
    """Let go of a record, and take this living process out of it, which made it."""
    path = Path(record.path)
    lines = [line for line in path.read_text().splitlines() if f'"pid": {os.getpid()},' not in line]
    path.write_text("".join(line + "\n" for line in lines))
    record.close()


def test_the_next_start_ends_what_a_dead_run_left(place: Place) -> None:
    """Children, other sessions, double forks without an environment, the cgroup, the record."""
    left = place.dead_run()
    assert len(left.pids) == 5
    assert all(alive(pid) for pid in left.pids)
    done = stopbath(place, "run", "--", "true")
    assert not any(alive(pid) for pid in left.pids)
    assert place.records() == []
    assert done.stderr.count("swept the dead run dead") == 1
    assert "5 processes ended" in done.stderr
    assert stopbath(place, "run", "--", "true").stderr == ""


def test_the_next_group_of_a_program_sweeps_too(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    left = place.dead_run()
    with WorkerGroup("g", [WorkerSpec("misbehaving:obedient")]):
        assert not any(alive(pid) for pid in left.pids)
    assert "swept the dead run" in capsys.readouterr().err


def test_without_a_cgroup_the_mark_and_the_tree_tell(place: Place) -> None:
    """One whose environment is wiped and whose parents are gone cannot be proved: left alone."""
    left = place.dead_run()
    claim = claimed()
    cgroups = claim.run.resources
    claim.run = claim.run._replace(resources=())
    swept = sweep(claim)
    *provable, wiped = left.pids
    assert {it["pid"] for it in swept.ended} == set(provable)
    assert not any(alive(pid) for pid in provable)
    assert alive(wiped)
    ref = ProcessRef.open(wiped)
    ref.send(signal.SIGKILL)
    ref.dead(5)
    ref.close()
    for it in cgroups:
        wait_until(lambda it=it: not _remove_leaves(it["path"]), Deadline.after(5))  # type: ignore[misc]


def _remove_leaves(path: str) -> bool:
    """Whether it is still there."""
    for where, _, _ in os.walk(path, topdown=False):
        try:
            os.rmdir(where)  # noqa: PTH106
        except OSError:
            return True
    return False


def test_one_that_ignores_sigterm_is_killed(place: Place) -> None:
    left = place.dead_run(
        "import os, signal, time; signal.signal(15, signal.SIG_IGN);"
        "print(os.getpid(), flush=True); time.sleep(300)"
    )
    swept = sweep(claimed(), terminate_s=0.1, kill_s=5)
    assert [(it["pid"], it["outcome"]) for it in swept.ended] == [(left.pids[0], "killed")]
    assert swept.over


def test_a_pid_that_changed_hands_is_never_touched(
    place: Place, stranger: subprocess.Popen[bytes]
) -> None:
    """Same number, another start time: somebody else's process."""
    stat = read_stat(stranger.pid)
    assert stat is not None
    record_of("aaaa", ("worker", stranger.pid, stat.start - 1))
    assert leftovers(registered()[0][0]).processes == ()
    # Nor when the number changes hands between the look and the signal.
    found = (Left("sleep", "made up", stranger.pid, stat.start - 1),)
    _end(found, {}, Deadline.after(0), Deadline.after(0.1))
    assert stranger.poll() is None
    swept = sweep(claimed(), terminate_s=0.1, kill_s=0.1)
    assert (swept.ended, swept.over) == ((), True)
    assert stranger.poll() is None
    assert place.records() == []


def test_a_record_of_another_boot_or_namespace_ends_nobody(
    place: Place, stranger: subprocess.Popen[bytes]
) -> None:
    stat = read_stat(stranger.pid)
    assert stat is not None
    for run_id, change in (("boot", "0000"), ("space", " pid:[1]")):
        record_of(run_id, ("worker", stranger.pid, stat.start))
        (record,) = place.records()
        lines = place.lines(record)
        boot, _, space = lines[0]["host"].partition(" ")
        lines[0]["host"] = f"0000 {space}" if change == "0000" else boot + change
        record.write_text("".join(json.dumps(line) + "\n" for line in lines))
        swept = sweep(claimed(), terminate_s=0.1, kill_s=0.1)
        assert swept.ended == ()
        # After a reboot nothing of it can be alive; in another namespace who knows.
        assert swept.over == (run_id == "boot")
        assert stranger.poll() is None


def test_the_program_of_the_library_face_is_its_users(
    place: Place, stranger: subprocess.Popen[bytes]
) -> None:
    stat = read_stat(stranger.pid)
    assert stat is not None
    record_of("bbbb", ("program", stranger.pid, stat.start))
    assert sweep(claimed(), terminate_s=0.1, kill_s=0.1).ended == ()
    assert stranger.poll() is None
    assert place.records() == []


def test_a_run_that_lives_is_not_touched_beside_a_dead_one(place: Place) -> None:
    living = place.start()
    dead = place.dead_run()
    try:
        stopbath(place, "sweep", "--yes")
        assert not any(alive(pid) for pid in dead.pids)
        assert all(alive(pid) for pid in living.pids)
        assert len(place.records()) == 1
    finally:
        living.front.terminate()
        living.front.wait(10)


def test_without_a_terminal_and_without_yes_it_only_shows(place: Place) -> None:
    left = place.dead_run()
    for args in ((), ("--dry-run",), ("--dry-run", "--yes"), ("--json",)):
        done = stopbath(place, "sweep", *args)
        assert str(left.pids[0]) in done.stdout
        assert all(alive(pid) for pid in left.pids)
        assert len(place.records()) == 1
        if "--json" not in args:
            assert max(len(line) for line in done.stdout.splitlines()) <= 80
    done = stopbath(place, "sweep", "--yes", "--json")
    said = json.loads(done.stdout)
    assert said["acted"]
    assert {it["pid"] for it in said["swept"][0]["ended"]} == set(left.pids)
    assert not any(alive(pid) for pid in left.pids)
    assert "no dead run" in stopbath(place, "sweep").stdout


def test_a_sweep_from_inside_a_dead_run_ends_nothing_of_it(place: Place) -> None:
    """A shell under `run` whose guardian and keeper were killed goes on to be used."""
    marker = place.path / "swept"
    go = place.path / "go"
    os.mkfifo(go)
    script = (
        "import os, subprocess, sys\n"
        "sibling = subprocess.Popen(['sleep', '300'])\n"
        "print(os.getpid(), sibling.pid, flush=True)\n"
        f"open({str(go)!r}).read()\n"
        "done = subprocess.run([sys.executable, '-m', 'stopbath', 'sweep', '--yes'],"
        " stdin=subprocess.DEVNULL, capture_output=True, text=True)\n"
        f"open({str(marker)!r} + '.part', 'w').write(done.stdout)\n"
        f"os.rename({str(marker)!r} + '.part', {str(marker)!r})\n"
        "import time; time.sleep(300)\n"
    )
    left = place.dead_run(script)
    go.write_text("go")
    wait_until(marker.exists, Deadline.after(20))
    assert "this sweep runs below it" in marker.read_text()
    assert all(alive(pid) for pid in left.pids)
    stopbath(place, "sweep", "--yes")
    assert not any(alive(pid) for pid in left.pids)


@pytest.mark.skipif(not os.access(FREEZER, os.W_OK), reason="no freezer v1 to hold a process in")
def test_what_cannot_be_ended_is_named_and_its_record_kept(place: Place) -> None:
    left = place.dead_run("import os, time; print(os.getpid(), flush=True); time.sleep(300)")
    (pid,) = left.pids
    with frozen(pid):
        swept = sweep(claimed(), terminate_s=0.1, kill_s=0.2)
        assert (swept.survivors, swept.over) == ((pid,), False)
        assert "still alive" in str(swept)
        assert len(place.records()) == 1
    assert sweep(claimed(), terminate_s=0.1, kill_s=5).over
    assert place.records() == []


def test_shared_memory_goes_when_it_is_proved_and_nobody_holds_it(place: Place) -> None:
    segment = SharedMemory(create=True, size=4096)
    path = f"/dev/shm/{segment.name}"
    found = Path(path).stat()

    def left_by(**wrong: Any) -> None:
        record = Record.create("cccc", "run", "made up", ["x"])
        facts: dict[str, Any] = {"path": path, "dev": found.st_dev, "ino": found.st_ino}
        record.note_resource("shm", **(facts | wrong))
        without_us(record)

    try:
        left_by()
        swept = sweep(claimed())
        assert [one.why for one in swept.untouched] == [
            f"still owned: process {os.getpid()} holds it"
        ]
        assert Path(path).exists()
        place.records()[0].unlink()
        segment.close()
        left_by(ino=found.st_ino + 1)
        assert not sweep(claimed()).over
        assert Path(path).exists()
        place.records()[0].unlink()
        left_by()
        assert sweep(claimed()).removed == (f"shm {path}",)
        assert not Path(path).exists()
    finally:
        from multiprocessing import resource_tracker

        segment.close()
        Path(path).unlink(missing_ok=True)
        resource_tracker.unregister(segment._name, "shared_memory")  # type: ignore[attr-defined]
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@pytest.mark.parametrize("refusals", [3, 10**4])
def test_a_cgroup_that_is_still_populated_is_waited_for_and_its_record_kept(
    place: Place, monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    """Zombies populate it on some kernels, and their new parent may be late to reap them."""
    answers = iter([False] * refusals)
    over = refusals == 3
    monkeypatch.setattr(_sweep, "remove_tree", lambda _: next(answers, True))
    monkeypatch.setattr(_leftovers, "is_cgroup_of", lambda *_: True)
    home = place.path / "stopbath-dddd"
    home.mkdir()
    record = Record.create("dddd", "run", "made up", ["x"])
    record.note_resource("cgroup", path=str(home))
    without_us(record)
    began = time.monotonic()
    swept = sweep(claimed())
    assert time.monotonic() - began < 2
    assert swept.over == over
    assert swept.removed == ((f"cgroup {home}",) if over else ())
    assert len(place.records()) == (not over)
    if not over:
        assert [one.why for one in swept.untouched] == ["what was in it is not reaped yet"]


def test_a_program_and_its_keeper_killed_at_once_leave_helpers_to_the_next_start(
    place: Place,
) -> None:
    """Workers die by the kernel's hand; what they started in sessions of its own does not."""
    script = """
import os, signal, sys
from stopbath.lifecycle import Deadline, WorkerGroup, WorkerSpec
group = WorkerGroup("g", [WorkerSpec("dead_runs_workers:with_helper")])
group.start(); group.wait_ready(Deadline.after(20))
print(group.workers[0].pid, group.workers[0].info, flush=True)
signal.pause()
"""
    path = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, sys.path)])
    program = subprocess.Popen(
        [sys.executable, "-c", script],
        env=place.env | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    worker, helper = (int(word) for word in program.stdout.readline().split())
    program.stdout.close()
    (record,) = place.records()
    kill_at_once(place.holders(record))
    program.wait(5)
    wait_until(lambda: not alive(worker), Deadline.after(5))
    assert alive(helper)
    assert "swept" in stopbath(place, "run", "--", "true").stderr
    assert not alive(helper)


def test_a_keeper_that_is_killed_leaves_no_helper_when_the_group_is_over(place: Place) -> None:
    """The program adopts nothing, but it knows the run's cgroup and mark."""
    group = WorkerGroup("g", [WorkerSpec("dead_runs_workers:with_helper")])
    group.start()
    group.wait_ready(Deadline.after(20))
    helper = int(group.workers[0].info)
    (record,) = place.records()
    keeper = ProcessRef.open(place.holders(record)[1])
    keeper.send(signal.SIGKILL)
    keeper.dead(5)
    keeper.close()
    group.shutdown(Deadline.after(5))
    wait_until(lambda: not alive(helper), Deadline.after(5))
    assert place.records() == []
