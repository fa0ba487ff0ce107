"""Workers that are forked off a process that has imported once what they need."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from observing import FREEZER, alive, frozen, run_processes, state_of, wait_until
from stopbath.lifecycle import (
    Deadline,
    Escalation,
    LifecycleError,
    StartupError,
    Supervisor,
    WorkerGroup,
    WorkerSpec,
)
from stopbath.lifecycle._process import children_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from guarded import Run

pytestmark = pytest.mark.usefixtures("nothing_left")

PRELOAD = {"preload": ["born"]}
WHERE = ("born:tells_where", PRELOAD)
HANGS = ("born:tells_where", {"preload": ["born"], "env": {"BORN": "hangs"}})
# What cannot be forked off is started as a program: without the misbehaviour, so not of `born`.
BAD = "obedient"


def bad(how: str) -> tuple[str, dict[str, Any]]:
    """Give a worker that preloads a module which misbehaves, and does not need it."""
    return BAD, {"preload": ["born"], "env": {"BORN": how}}


def keeper_of(group: WorkerGroup) -> int:
    supervisor = group._supervisor
    assert supervisor is not None
    assert supervisor.keeper.ref is not None
    return supervisor.keeper.ref.pid


def zygotes_of(group: WorkerGroup) -> list[int]:
    """Find the keeper's children that are none of the group's workers."""
    workers = {worker.pid for worker in group.workers}
    return [pid for pid in children_of(keeper_of(group)) if pid not in workers and alive(pid)]


def zygote_of(group: WorkerGroup) -> int:
    """Wait for the one there is to be there."""
    wait_until(lambda: len(zygotes_of(group)) == 1, Deadline.after(5), "a zygote")
    return zygotes_of(group)[0]


def is_waiting_in_pause(pid: int) -> bool:
    """Whether a process sits in pause(2), as `born` does when it hangs."""
    pause = {"x86_64": "34"}.get(os.uname().machine)
    words = Path(f"/proc/{pid}/syscall").read_text().split()
    return bool(words) and (words[0] == pause if pause else words[0] != "running")


def ended(*pids: int) -> None:
    wait_until(lambda: not any(map(alive, pids)), Deadline.after(2), f"{pids} have ended")


def test_workers_are_born_of_one_import(group_of: Callable[..., WorkerGroup]) -> None:
    """All see what one process has imported, and are the keeper's children all the same."""
    group = group_of(*[WHERE] * 4)
    told = [worker.info for worker in group.workers]
    zygote = zygote_of(group)
    assert [it["imported_in"] for it in told] == [zygote] * 4
    assert [it["parent"] for it in told] == [keeper_of(group)] * 4
    assert [it["session"] for it in told] == [worker.pid for worker in group.workers]
    report = group.shutdown(Deadline.after(5))
    assert report.clean
    assert [it.outcome for it in report.workers] == ["drained"] * 4
    assert report.strays == ()
    ended(zygote)


def test_a_forked_worker_is_born_as_any_other(group_of: Callable[..., WorkerGroup]) -> None:
    """Session, signals, descriptors, environment, flags: what an executed one has."""
    read_end, write_end = os.pipe()
    fields = {"fds": {"more": write_end}, "env": {"BORN": "changes signals"}, "name": "one"}
    try:
        told = []
        for preload in (["born"], []):
            group = group_of(("born:tells_all", {**fields, "preload": preload}))
            told.append(group.workers[0].info)
            group.shutdown(Deadline.after(5))
        forked, executed = told
    finally:
        os.close(read_end)
        os.close(write_end)
    # The executed one has imported it itself, and has what the zygote was rid of.
    for what in ("ignored", "blocked", "sigterm"):
        assert forked.pop(what) != executed.pop(what)
    assert forked == executed
    assert forked["fds"].keys() == {"0", "1", "2", "3", "10"}
    assert forked["threads"] == ["MainThread", "stopbath-control"]


def test_what_the_imports_did_to_signals_is_taken_back(
    group_of: Callable[..., WorkerGroup],
) -> None:
    """As a new program has them: nothing blocked, nothing ignored but by the interpreter."""
    group = group_of(("born:tells_all", {**PRELOAD, "env": {"BORN": "changes signals"}}))
    told = group.workers[0].info
    assert int(told["blocked"], 16) == 0
    own = 1 << 12 | 1 << 24 | 3 << 31  # Python ignores SIGPIPE and SIGXFSZ, glibc its own two
    assert int(told["ignored"], 16) & ~own == 0
    assert "SIG_DFL" in told["sigterm"]


def test_the_last_words_of_a_forked_worker_are_its_own(
    group_of: Callable[..., WorkerGroup],
) -> None:
    """Its stderr is read by its supervisor, whatever the zygote's is."""
    group = group_of(("raises_before_ready", PRELOAD), ready=False)
    with pytest.raises(StartupError, match="no such checkpoint") as failed:
        group.wait_ready(Deadline.after(20))
    assert "w0: cannot open the checkpoint" in failed.value.cause.last_stderr


def test_a_function_of_the_script_itself(program: Callable[..., subprocess.Popen[str]]) -> None:
    """A target that is defined in `__main__` is found from a forked worker, too."""
    host = program(
        """
        from pathlib import Path
        import runpy, tempfile
        code = '''
        import born
        from stopbath.lifecycle import Deadline, WorkerGroup, WorkerSpec
        def work(ctx):
            born.tells_where(ctx)
        if __name__ == "__main__":
            with WorkerGroup("g", [WorkerSpec(work, preload=["born"])]) as group:
                print(group.workers[0].pid, group.workers[0].info["imported_in"], flush=True)
        '''
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "script.py"
            script.write_text(code)
            sys.argv = [str(script)]
            runpy.run_path(str(script), run_name="__main__")
        """
    )
    assert host.stdout is not None
    pid, imported_in = (int(word) for word in host.stdout.readline().split())
    assert pid != imported_in
    assert host.wait(10) == 0


@pytest.mark.parametrize("signalled", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_a_zygote_harms_nobody(
    group_of: Callable[..., WorkerGroup], capfd: pytest.CaptureFixture[str], signalled: int
) -> None:
    """Its workers live on, and one that is asked for later starts without it."""
    group = group_of(WHERE, WHERE)
    zygote = zygote_of(group)
    os.kill(zygote, signalled)
    ended(zygote)
    wait_until(lambda: not zygotes_of(group), Deadline.after(5), "it was reaped")
    later = WorkerGroup("later", [WorkerSpec("born:tells_where", **PRELOAD)])
    later.start()
    later.wait_ready(Deadline.after(20))
    assert later.workers[0].info["imported_in"] == later.workers[0].pid
    assert later.shutdown(Deadline.after(5)).clean
    assert group.cause is None
    assert all(alive(worker.pid or 0) for worker in group.workers)
    assert group.shutdown(Deadline.after(5)).clean
    name = signal.Signals(signalled).name
    assert f"the zygote was killed by {name}; workers start without one" in capfd.readouterr().err


def test_another_group_is_born_of_the_same_zygote(group_of: Callable[..., WorkerGroup]) -> None:
    """A group that is started again, while there is another, need not import again."""
    stays = group_of(WHERE)
    for _ in range(3):
        group = group_of(WHERE)
        assert group.workers[0].info["imported_in"] == stays.workers[0].info["imported_in"]
        assert group.shutdown(Deadline.after(5)).clean


def test_another_list_has_another_zygote(group_of: Callable[..., WorkerGroup]) -> None:
    """What one worker does not need, it does not get."""
    group = group_of(WHERE, ("born:tells_where", {"preload": ["born", "decimal:Decimal"]}))
    assert len({worker.info["imported_in"] for worker in group.workers}) == 2


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("raises", "could not import: ImportError: no such engine"),
        ("exits", "could not import: SystemExit: 3"),
        ("starts a thread", "has 2 threads after its imports"),
        ("dies", "was killed by SIGKILL"),
    ],
)
def test_what_cannot_be_forked_off_starts_as_a_program(
    group_of: Callable[..., WorkerGroup], capfd: pytest.CaptureFixture[str], how: str, why: str
) -> None:
    """One line says why, once; the workers are ready all the same."""
    group = group_of(bad(how), bad(how))
    assert not zygotes_of(group)
    more = WorkerGroup("more", [WorkerSpec("misbehaving:obedient", **bad(how)[1])])
    more.start()
    more.wait_ready(Deadline.after(20))
    more.shutdown(Deadline.after(5))
    assert group.shutdown(Deadline.after(5)).clean
    assert capfd.readouterr().err.count(f"stopbath: the zygote {why}; workers start without") == 1


def test_a_name_that_is_not_there(
    group_of: Callable[..., WorkerGroup], capfd: pytest.CaptureFixture[str]
) -> None:
    """The worker that needs it will say so; one that does not is ready."""
    group_of(("obedient", {"preload": ["born:no_such_class"]}))
    assert "could not import: AttributeError" in capfd.readouterr().err


def test_a_device_that_is_open_must_not_be_shared(
    program: Callable[..., subprocess.Popen[str]],
) -> None:
    """A context of a driver does not survive a fork: such a zygote is refused."""
    host = program(
        """
        from stopbath.lifecycle import _zygote
        _zygote._check()
        _zygote._DEVICES = ("/dev/zero",)
        with open("/dev/zero") as device:
            try:
                _zygote._check()
            except _zygote._Unfit as why:
                tell(why)
        """
    )
    assert host.stdout is not None
    assert host.stdout.readline() == "has opened /dev/zero while it was importing\n"


def test_a_fork_that_fails(group_of: Callable[..., WorkerGroup]) -> None:
    """Where no process is to be had for a fork, the worker is started another way."""
    group = group_of(bad("cannot fork"), bad("cannot fork"))
    assert all(worker.pid for worker in group.workers)
    assert group.shutdown(Deadline.after(5)).clean


def test_a_zygote_that_does_not_answer_is_given_up(
    group_of: Callable[..., WorkerGroup], capfd: pytest.CaptureFixture[str]
) -> None:
    """Within seconds; who waits for it is started as a program."""
    group = group_of(WHERE)
    zygote = zygote_of(group)
    os.kill(zygote, signal.SIGSTOP)
    wait_until(lambda: state_of(zygote) == "T", Deadline.after(5))
    began = time.monotonic()
    later = group_of(WHERE)
    assert 4.5 < time.monotonic() - began < 10
    assert later.workers[0].info["imported_in"] == later.workers[0].pid
    ended(zygote)
    assert "the zygote has not answered for 5 s" in capfd.readouterr().err


def test_a_stop_while_the_zygote_imports(group_of: Callable[..., WorkerGroup]) -> None:
    """Nobody is born any more, so nobody is waited for."""
    group = group_of(HANGS, HANGS, ready=False)
    zygote = zygote_of(group)
    wait_until(lambda: is_waiting_in_pause(zygote), Deadline.after(5), "it hangs")
    report = group.shutdown(Deadline.after(5))
    assert report.clean
    assert report.duration_s < 0.5
    assert [worker.pid for worker in report.workers] == [None, None]
    ended(zygote)


def test_a_stop_while_a_birth_is_owed(group_of: Callable[..., WorkerGroup]) -> None:
    """By its deadline, with a zygote that does not answer; what it forks later ends by itself."""
    stays = group_of(WHERE)
    zygote = zygote_of(stays)
    os.kill(zygote, signal.SIGSTOP)
    wait_until(lambda: state_of(zygote) == "T", Deadline.after(5))
    group = group_of(WHERE, WHERE, ready=False)
    report = group.shutdown(Deadline.after(0.5))
    assert report.clean
    assert report.duration_s < 0.6
    os.kill(zygote, signal.SIGCONT)
    again = group_of(WHERE)
    assert again.workers[0].info["imported_in"] == zygote
    keeper = keeper_of(again)
    known = {zygote, again.workers[0].pid, stays.workers[0].pid}
    wait_until(lambda: set(children_of(keeper)) == known, Deadline.after(2), "no other is left")


def test_a_start_that_is_too_slow_fails_by_its_budget(
    group_of: Callable[..., WorkerGroup],
) -> None:
    """The zygote's import is part of the start."""
    group = group_of(HANGS, ready=False, start_s=0.3)
    with pytest.raises(StartupError, match=r"no progress for 0\.3 s"):
        group.wait_ready(Deadline.after(20))


@pytest.mark.skipif(not FREEZER.is_dir() or os.geteuid() != 0, reason="no v1 freezer, or not root")
def test_a_survivor_that_was_never_born_is_none(group_of: Callable[..., WorkerGroup]) -> None:
    """With a frozen keeper nobody answers; once it goes on, the account is made anew."""
    group = group_of(HANGS, ready=False, escalation=Escalation(0.1, 0.1, 0.1))
    zygote = zygote_of(group)
    with frozen(keeper_of(group)) as thaw:
        report = group.shutdown(Deadline.after(0.5))
        assert [worker.outcome for worker in report.workers] == ["survived"]
        thaw()
        wait_until(lambda: group.state.value == "stopped", Deadline.after(5), "it was called off")
    assert group.shutdown(Deadline.after(1)).clean
    ended(zygote)


@pytest.mark.parametrize("who", ["program", "keeper"])
@pytest.mark.parametrize("how", ["hangs", ""])
def test_whoever_is_killed_takes_the_zygote_along(
    program: Callable[..., subprocess.Popen[str]], who: str, how: str
) -> None:
    """In the middle of its import, and when it waits to be asked."""
    host = program(
        f"""
        spec = dict(preload=["born"], env={{"BORN": {how!r}}})
        group = WorkerGroup("g", [WorkerSpec("born:tells_where", **spec)])
        group.start()
        if not {how!r}:
            group.wait_ready(Deadline.after(20))
        tell(group._supervisor.keeper.ref.pid)
        threading.Event().wait()
        """
    )
    assert host.stdout is not None
    keeper = int(host.stdout.readline())
    wait_until(lambda: children_of(keeper), Deadline.after(5), "a zygote")
    family = children_of(keeper)
    os.kill(host.pid if who == "program" else keeper, signal.SIGKILL)
    ended(keeper, *family)
    host.kill()
    host.wait()
    subprocess.run(
        [sys.executable, "-m", "stopbath", "sweep", "--yes"], check=True, capture_output=True
    )


@pytest.mark.parametrize("who", ["guardian", "keeper", "server"])
def test_a_server_with_a_zygote_whose_tree_is_cut(guard: Callable[..., Run], who: str) -> None:
    """`Run.ended` looks for everything that carries this test's mark, the zygote included."""
    run = guard(preload=("born",))
    zygotes = run_processes() - set(run.pids.values())
    assert len(zygotes) == 1
    run.kill(who)
    run.ended()
    ended(*zygotes)


def test_a_rank_that_is_called_off_is_nothing_to_the_guardian(guard: Callable[..., Run]) -> None:
    """The keeper tells it of all births that failed; only its own is a fault of its server."""
    run = guard("calls_off_ranks")
    assert run.hear("called off ").strip() == "True [None]"
    run.kill("guardian", signal.SIGTERM)
    assert run.ended() == 0
    assert run.report["cause"] is None


def test_strays_of_a_forked_worker_are_its_own(group_of: Callable[..., WorkerGroup]) -> None:
    """What leaves a forked worker's session comes to the keeper, and is ended when it is dead."""
    group = group_of(("leaves_strays", {**PRELOAD}), "obedient")
    info = group.workers[0].info
    os.kill(info["pid"], signal.SIGKILL)
    ended(info["helper"], info["stray"])
    report = group.shutdown(Deadline.after(5))
    assert info["stray"] in {it["pid"] for it in report.strays}


def test_a_helper_of_the_imports_ends_with_the_zygote(group_of: Callable[..., WorkerGroup]) -> None:
    """What a module starts when it is imported is the zygote's, not a worker's."""
    group = group_of(("born:tells_where", {**PRELOAD, "env": {"BORN": "leaves a process"}}))
    zygote = group.workers[0].info["imported_in"]
    helpers = children_of(zygote)
    assert len(helpers) == 1
    os.kill(zygote, signal.SIGKILL)
    ended(zygote, *helpers)
    assert group.shutdown(Deadline.after(5)).clean


@pytest.mark.parametrize("preload", [[], ["born"]])
def test_a_forked_worker_that_starts_workers(
    group_of: Callable[..., WorkerGroup], preload: list[str]
) -> None:
    """It is a client of the keeper of its own, whose zygote ends with it."""
    group = group_of(
        ("born:has_a_group", {**PRELOAD, "keeper_access": True, "args": (preload,)}),
    )
    outer, inner = zygote_of_outer(group), group.workers[0].info
    assert inner["parent"] == keeper_of(group)
    assert (inner["imported_in"] != inner["pid"]) == bool(preload)
    assert inner["imported_in"] != outer
    os.kill(group.workers[0].pid or 0, signal.SIGKILL)
    ended(inner["pid"], inner["imported_in"])
    assert alive(outer)


def zygote_of_outer(group: WorkerGroup) -> int:
    """Give the zygote of the group itself, the first one."""
    return min(zygotes_of(group))


def test_many_are_born_at_once(group_of: Callable[..., WorkerGroup]) -> None:
    """One after the other; none is lost, or taken for a stray by a keeper that looks meanwhile."""
    stays = group_of(WHERE)
    keeper, born = keeper_of(stays), threading.Event()

    def wake() -> None:
        while not born.wait(0.0005):
            os.kill(keeper, signal.SIGCHLD)  # as if something had come back to it

    waker = threading.Thread(target=wake)
    waker.start()
    try:
        group = group_of(*[WHERE] * 40)
    finally:
        born.set()
        waker.join()
    one = stays.workers[0].info["imported_in"]
    assert {worker.info["imported_in"] for worker in group.workers} == {one}
    report = group.shutdown(Deadline.after(10))
    assert report.clean
    assert report.strays == ()


@pytest.mark.parametrize("seed", range(20))
def test_a_zygote_killed_at_any_instant(group_of: Callable[..., WorkerGroup], seed: int) -> None:
    """The start goes on, one way or the other, and nothing is born that nobody owns."""
    dice = random.Random(seed)  # noqa: S311  (not for secrets)
    group = group_of(*[WHERE] * 3, start=False)
    after_s = dice.uniform(0, 0.25)
    group.start()
    by = Deadline.after(after_s)
    while not by.passed:
        time.sleep(0.001)
    for zygote in children_of(keeper_of(group))[:1]:  # it is the first; what it forks comes later
        os.kill(zygote, signal.SIGKILL)
    group.wait_ready(Deadline.after(20))
    pids = {worker.pid for worker in group.workers}
    keeper = keeper_of(group)
    wait_until(
        lambda: pids <= set(children_of(keeper)) and len(children_of(keeper)) <= 4,
        Deadline.after(2),
        "no other is left",
    )
    assert group.shutdown(Deadline.after(5)).clean


@pytest.mark.parametrize("preload", ["torch", ["torch", ""], ["torch:"], [":name"], [3]])
def test_a_list_names_modules(preload: Any) -> None:
    """A string would be a list of letters."""
    with pytest.raises(ValueError, match="preload is a list of 'module' or 'module:name'"):
        WorkerSpec("m:f", preload=preload)


def test_to_call_off_what_is_born_or_was_never_asked_for(
    group_of: Callable[..., WorkerGroup],
) -> None:
    """Nothing happens: the worker is stopped like any other."""
    group = group_of(WHERE)
    supervisor = group._supervisor
    assert isinstance(supervisor, Supervisor)
    asked = threading.Event()

    def cancel() -> None:
        for ident in (1, 77):
            supervisor.keeper.cancel(ident)
        asked.set()

    supervisor.post(cancel)
    assert asked.wait(5)
    assert group.shutdown(Deadline.after(5)).clean


def test_a_zygote_of_a_client_that_is_gone_is_not_asked_for(
    group_of: Callable[..., WorkerGroup],
) -> None:
    """A stop of the last group ends the keeper, in the middle of an import as well."""
    group = group_of(HANGS, start=False)
    with pytest.raises(LifecycleError):
        group.shutdown()
    group.start()
    keeper, zygote = keeper_of(group), zygote_of(group)
    group.kill()
    group.shutdown(Deadline.after(2))
    ended(keeper, zygote)
