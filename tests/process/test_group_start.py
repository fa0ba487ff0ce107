"""Starting: it becomes ready, or it fails in the words of the one that failed, and is gone."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import misbehaving
from observing import alive, run_processes, wait_until
from stopbath.lifecycle import (
    Deadline,
    Escalation,
    Exit,
    GroupState,
    LifecycleError,
    NotStarted,
    StartupError,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("nothing_left")


def fail_to_start(group: WorkerGroup, patience_s: float = 15) -> StartupError:
    """Wait for a start that fails; at that moment every worker must be gone."""
    with pytest.raises(StartupError) as caught:
        group.wait_ready(Deadline.after(patience_s))
    assert group.state is GroupState.STOPPED
    for worker in group.workers:
        assert worker.state is WorkerState.GONE
        assert worker.pid is None or not alive(worker.pid)
    return caught.value


def test_a_group_becomes_ready_and_its_workers_tell_what_they_are(
    group_of: Callable[..., WorkerGroup],
) -> None:
    group = group_of("obedient", "obedient")
    assert group.state is GroupState.READY
    assert [worker.name for worker in group.workers] == ["w0", "w1"]
    assert [worker.rank for worker in group.workers] == [0, 1]
    assert [worker.info["pid"] for worker in group.workers] == [w.pid for w in group.workers]
    assert repr(group.workers[0]) == f"<worker w0 pid {group.workers[0].pid} ready>"


@pytest.mark.parametrize(
    ("target", "what", "end", "words"),
    [
        ("raises_before_ready", "raised FileNotFoundError: no such", None, "open the checkpoint"),
        ("returns_before_ready", "returned before it was ready", None, "nothing to do"),
        ("dies_while_starting", "was killed by SIGKILL", Exit(signal=9), "out of memory"),
        ("no_such_function", "raised AttributeError", None, "no_such_function"),
        ("__name__", "raised TypeError: misbehaving:__name__ is a str", None, "not a function"),
        ("no_such_module:main", "raised ModuleNotFoundError: No module", None, "no_such_module"),
    ],
)
def test_a_worker_that_fails_is_named_with_its_last_lines_and_its_peers_are_gone(
    group_of: Callable[..., WorkerGroup],
    target: str,
    what: str,
    end: Exit | None,
    words: str,
) -> None:
    """Also when a peer ignores everything while it starts."""
    began = time.monotonic()
    group = group_of("obedient", target, "deaf_while_starting", ready=False)
    error = fail_to_start(group)
    assert error.cause.worker == "w1"
    assert what in error.cause.what
    assert end is None or error.cause.exit == end
    assert any(words in line for line in error.cause.last_stderr)
    assert words in str(error)
    assert error.report is group.report
    assert time.monotonic() - began < 6


def test_a_module_that_exits_while_it_is_imported(
    group_of: Callable[..., WorkerGroup], tmp_path: Path
) -> None:
    (tmp_path / "leaves.py").write_text(
        "import sys\nprint('no GPU', file=sys.stderr)\nsys.exit(9)\n"
    )
    group = group_of(("leaves:main", {"path": [str(tmp_path), *sys.path]}), "obedient", ready=False)
    cause = fail_to_start(group).cause
    assert (cause.worker, cause.exit) == ("w0", Exit(code=9))
    assert cause.last_stderr == ("no GPU",)


def test_the_last_phase_is_told(group_of: Callable[..., WorkerGroup]) -> None:
    group = group_of("dies_while_starting", ready=False)
    assert fail_to_start(group).cause.phase == "loading 3/10"


def test_arguments_that_do_not_pickle_fail_the_start() -> None:
    spec = WorkerSpec("misbehaving:obedient", args=(lambda: None,), name="w0")
    group = WorkerGroup("test", [spec])
    group.start()
    assert "cannot be given its target" in fail_to_start(group).cause.what


def test_a_function_is_a_target_too() -> None:
    group = WorkerGroup("test", [WorkerSpec(misbehaving.obedient)])
    with group:
        assert group.workers[0].name == "test0"
        assert group.state is GroupState.READY
    assert group.state is GroupState.STOPPED
    assert group.report is not None
    assert group.report.clean


def test_an_exception_in_the_with_block_stops_the_group() -> None:
    group = WorkerGroup("test", [WorkerSpec(misbehaving.obedient)])

    def use() -> None:
        with group:
            raise RuntimeError("of the user's")

    with pytest.raises(RuntimeError, match="of the user's"):
        use()
    assert group.state is GroupState.STOPPED


def test_one_that_loads_for_ever_fails_at_the_callers_deadline(
    group_of: Callable[..., WorkerGroup],
) -> None:
    group = group_of("obedient", "never_ready", ready=False)
    began = time.monotonic()
    cause = fail_to_start(group, 1.0).cause
    assert cause.worker == "w1"
    assert "not ready in time" in cause.what
    assert 0.9 < time.monotonic() - began < 3.5


def test_one_that_says_nothing_fails_after_its_own_budget(
    group_of: Callable[..., WorkerGroup],
) -> None:
    group = group_of("obedient", "never_ready", ready=False, start_s=1.0)
    assert "no progress for 1." in fail_to_start(group).cause.what


def test_progress_extends_the_budget_up_to_the_cap(group_of: Callable[..., WorkerGroup]) -> None:
    """Also when it is told faster than anybody reads."""
    began = time.monotonic()
    group = group_of("progress_for_ever", ready=False, start_s=0.8, start_cap_s=2.5)
    cause = fail_to_start(group).cause
    assert 2.4 < time.monotonic() - began < 5
    assert cause.phase.startswith("xxx")


def test_a_budget_of_many_years_is_one(group_of: Callable[..., WorkerGroup]) -> None:
    """Longer than epoll's 31 bits of milliseconds."""
    group = group_of("obedient", start_s=1e9, start_cap_s=1e9)
    assert group.shutdown().clean


@pytest.mark.parametrize("delay_s", [0, 0.01, 0.03, 0.06, 0.09, 0.12, 0.15, 0.2, 0.3])
@pytest.mark.parametrize("harder", [False, True])
def test_a_stop_during_the_start_at_any_instant(
    group_of: Callable[..., WorkerGroup], delay_s: float, *, harder: bool
) -> None:
    """No window in which a worker could be forgotten; the delay sweeps over the start."""
    group = group_of("obedient", "deaf_while_starting", "obedient", ready=False)
    time.sleep(delay_s)
    if harder:
        group.kill()
    report = group.shutdown(Deadline.after(2))
    assert group.state is GroupState.STOPPED
    assert not report.survivors
    assert report.cause is None
    for worker in group.workers:
        assert worker.pid is None or not alive(worker.pid)
    with pytest.raises(StartupError):
        group.wait_ready(Deadline.after(1))


def test_a_stop_by_a_deadline_that_has_passed_before_anything_was_spawned(
    group_of: Callable[..., WorkerGroup],
) -> None:
    """What the keeper spawns after that never runs the user's code, and is ended."""
    group = group_of("obedient", "deaf", ready=False)
    group.shutdown(Deadline.after(-1))
    wait_until(lambda: group.state is GroupState.STOPPED, Deadline.after(5))
    assert all(worker.info is None and worker.phase != "running" for worker in group.workers)
    assert group.survivors == ()


def test_a_worker_killed_while_it_starts(group_of: Callable[..., WorkerGroup]) -> None:
    group = group_of("never_ready", "obedient", ready=False)
    wait_until(lambda: group.workers[0].pid is not None, Deadline.after(5))
    os.kill(group.workers[0].pid or 0, 9)
    cause = fail_to_start(group).cause
    assert (cause.worker, cause.exit) == ("w0", Exit(signal=9))


def test_whoever_waits_for_a_group_that_is_stopped_is_told(
    group_of: Callable[..., WorkerGroup],
) -> None:
    group = group_of("never_ready", ready=False)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            group.wait_ready(Deadline.after(20))
        except StartupError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    group.kill()
    group.shutdown()
    waiter.join(5)
    assert "was stopped" in str(errors[0])


def test_the_thread_that_started_a_group_may_end(group_of: Callable[..., WorkerGroup]) -> None:
    """The parent-death signal goes with a thread; the keeper has one, for ever (F15)."""
    made: list[WorkerGroup] = []
    starter = threading.Thread(target=lambda: made.append(group_of("obedient", "obedient")))
    starter.start()
    starter.join()
    tid = starter.native_id
    wait_until(lambda: not os.path.exists(f"/proc/self/task/{tid}"), Deadline.after(5))  # noqa: PTH110
    (group,) = made
    assert all(alive(worker.pid or 0) for worker in group.workers)
    assert group.cause is None
    assert group.shutdown().clean


def test_descriptors_and_environment_reach_the_worker(group_of: Callable[..., WorkerGroup]) -> None:
    """The caller closes its copies after `start()`; nothing else of it is inherited."""
    heard, told = os.pipe()
    os.set_inheritable(heard, True)
    group = group_of(("heard", {"fds": {"heard": told}, "env": {"COLOUR": "red"}}))
    os.close(told)
    pid = group.workers[0].pid
    with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
        assert b"\0COLOUR=red\0" in b"\0" + file.read()
    theirs = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}  # noqa: PTH208
    assert theirs == {0, 1, 2, 3, 10}
    group.shutdown()
    with os.fdopen(heard, "rb") as file:
        assert file.read().startswith(b"N")  # drain, then whatever followed


def test_a_group_starts_once(group_of: Callable[..., WorkerGroup]) -> None:
    group = group_of("obedient")
    with pytest.raises(LifecycleError, match="started before"):
        group.start()


def test_what_was_never_started_has_nothing_to_stop(group_of: Callable[..., WorkerGroup]) -> None:
    group = group_of("obedient", start=False)
    for stop in (group.shutdown, group.kill):
        with pytest.raises(NotStarted):
            stop()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"specs": []}, "at least one"),
        ({"specs": [WorkerSpec("a:b", name="x"), WorkerSpec("a:b", name="x")]}, "different names"),
        ({"start_s": 0}, "start_s"),
        ({"start_cap_s": float("nan")}, "start_cap_s"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        WorkerGroup("test", **{"specs": [WorkerSpec("a:b")], **options})


@pytest.mark.parametrize("target", ["module", "module:", ":function"])
def test_a_target_names_module_and_function(target: str) -> None:
    with pytest.raises(ValueError, match="module:function"):
        WorkerSpec(target)


def test_a_start_without_free_descriptors_fails_in_order(
    program: Callable[..., subprocess.Popen[str]],
) -> None:
    """The error names the shortage; what was started before it is gone (F26)."""
    host = program(
        """
        import resource
        fds = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (72, 4096))
        group = WorkerGroup("g", [WorkerSpec("misbehaving:obedient") for _ in range(30)])
        group.start()
        try:
            group.wait_ready(Deadline.after(20))
        except StartupError as error:
            tell("Too many open files" in str(error) or str(error))
            tell(sum(alive is WorkerState.GONE for alive in [w.state for w in group.workers]))
        group.shutdown()
        tell(len(os.listdir("/proc/self/fd")) - fds)
        """
    )
    assert host.communicate()[0].split("\n") == ["True", "30", "0", ""]


def test_many_workers_at_once(group_of: Callable[..., WorkerGroup]) -> None:
    group = group_of(*["obedient"] * 24, escalation=Escalation(5, 1, 2))
    assert len({worker.pid for worker in group.workers}) == 24
    assert group.shutdown(Deadline.after(8)).clean
    assert not run_processes() & {worker.pid for worker in group.workers}


def test_a_start_that_is_more_than_a_socket_holds(group_of: Callable[..., WorkerGroup]) -> None:
    """Every spawn carries an environment; what the keeper's socket does not take is sent later."""
    big = {"BIG": "x" * 100_000}
    group = group_of(*[("obedient", {"env": big})] * 8)
    assert group.shutdown(Deadline.after(8)).clean
