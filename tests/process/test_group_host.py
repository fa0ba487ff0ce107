"""The program that uses a group: any thread, any loop, any end; nothing of it is touched."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from observing import FREEZER, Ledger, alive, frozen, run_processes, state_of, wait_until
from stopbath.lifecycle import Deadline, GroupState, LifecycleError, WorkerGroup
from stopbath.lifecycle._containment import own_cgroup

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("nothing_left")

Run = "Callable[..., subprocess.Popen[str]]"

GROUP = """
group = WorkerGroup("g", [
    WorkerSpec("misbehaving:obedient"),
    WorkerSpec("misbehaving:deaf"),
    WorkerSpec("misbehaving:leaves_strays", kwargs={"deaf": True}),
    WorkerSpec("misbehaving:in_a_c_call"),
], escalation=Escalation(0.2, 0.2, 1))
group.start()
group.wait_ready(Deadline.after(20))
info = group.workers[2].info
tell(*[w.pid for w in group.workers], info["helper"], info["stray"])
"""


def started(host: subprocess.Popen[str]) -> list[int]:
    """Wait for the program's group; give the pids of its workers and their strays."""
    assert host.stdout is not None
    pids = [int(word) for word in host.stdout.readline().split()]
    assert len(pids) == 6
    assert all(alive(pid) for pid in pids)
    return pids


def gone(pids: list[int], by_s: float) -> None:
    wait_until(lambda: not any(alive(pid) for pid in pids), Deadline.after(by_s), f"{pids} gone")
    wait_until(lambda: not run_processes(), Deadline.after(by_s), "the keeper too")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_program_that_is_killed_leaves_nothing(program: Run, number: int) -> None:
    """Not even what left session and tree: the keeper sees the end and cleans up."""
    host = program(GROUP + "threading.Event().wait()")
    pids = started(host)
    host.send_signal(number)
    host.wait()
    assert host.returncode == -number
    gone(pids, 2)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise RuntimeError('of the user')", 1),
        ("os._exit(4)", 4),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        ("group.kill()", 0),
        ("group.shutdown(Deadline.after(0))", 0),
        ("del group", 0),
    ],
)
def test_a_program_that_ends_without_a_stop_leaves_nothing(
    program: Run, ending: str, code: int
) -> None:
    host = program(f"{GROUP}sys.stdin.readline()\n{ending}")
    pids = started(host)
    host.communicate("\n")
    assert host.returncode == code
    gone(pids, 2)


def test_a_program_killed_in_the_middle_of_a_stop_leaves_nothing(program: Run) -> None:
    host = program(
        GROUP
        + "threading.Thread(target=group.shutdown, daemon=True).start()\n"
        + "while group.state is not GroupState.STOPPING: pass\n"
        + "tell('stopping')\n"
        + "threading.Event().wait()"
    )
    pids = started(host)
    assert host.stdout is not None
    assert host.stdout.readline() == "stopping\n"
    host.kill()
    host.wait()
    gone(pids, 2)


def test_a_program_killed_while_it_starts_leaves_nothing(program: Run) -> None:
    host = program(
        """
        group = WorkerGroup("g", [WorkerSpec("misbehaving:never_ready") for _ in range(4)])
        group.start()
        tell("started")
        threading.Event().wait()
        """
    )
    assert host.stdout is not None
    assert host.stdout.readline() == "started\n"
    host.kill()
    host.wait()
    wait_until(lambda: not run_processes(), Deadline.after(2))


def test_two_groups_that_are_left_running_are_stopped_side_by_side(program: Run) -> None:
    """At the end of the interpreter the graces of the groups do not add up."""
    host = program(
        """
        import time
        groups = []
        for i in range(4):
            group = WorkerGroup(
                f"g{i}", [WorkerSpec("misbehaving:deaf")], escalation=Escalation(0.4, 0.4, 1)
            )
            group.start()
            groups.append(group)
        for group in groups:
            group.wait_ready(Deadline.after(20))
        import atexit
        atexit._run_exitfuncs()
        tell(all(group.state is GroupState.STOPPED for group in groups))
        tell(max(g.report.duration_s for g in groups) < 1.2)
        """
    )
    assert host.communicate()[0] == "True\nTrue\n"


@pytest.mark.parametrize("reaper", ["ignores SIGCHLD", "reaps everything"])
def test_a_host_that_reaps_or_ignores_children_loses_no_exit_status(
    program: Run, reaper: str
) -> None:
    """The workers are the keeper's children, not the program's (F17, F33)."""
    prelude = {
        "ignores SIGCHLD": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n",
        "reaps everything": """
def reap():
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            os.sched_yield()
threading.Thread(target=reap, daemon=True).start()
""",
    }[reaper]
    host = program(
        prelude
        + GROUP
        + """
go, trigger = os.pipe()
other = WorkerGroup("o", [WorkerSpec("misbehaving:waits_for", args=("exit",), fds={"go": go})])
other.start()
other.wait_ready(Deadline.after(20))
causes = []
done = threading.Event()
other.on_failure(lambda cause: (causes.append(cause), done.set()))
os.write(trigger, b"x")
done.wait(5)
tell(causes[0].exit.code)
other.shutdown()
report = group.shutdown(Deadline.after(5))
tell(*[w.outcome for w in report.workers], *[w.exit for w in report.workers])
"""
    )
    started(host)
    assert host.stdout is not None
    assert host.stdout.readline() == "7\n"
    assert host.communicate()[0] == (
        "drained killed killed killed"
        " exit code 0 killed by SIGKILL killed by SIGKILL killed by SIGKILL\n"
    )


def test_nothing_of_the_host_is_touched(program: Run) -> None:
    """No handler, mask, wake-up descriptor, start method, subreaper flag or parent-death signal."""
    host = program(
        """
        import ctypes, multiprocessing
        def look():
            flag, number = ctypes.c_int(), ctypes.c_int()
            libc = ctypes.CDLL(None)
            libc.prctl(37, ctypes.byref(flag), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
            libc.prctl(2, ctypes.byref(number), 0, 0, 0)  # PR_GET_PDEATHSIG
            handlers = [signal.getsignal(n) for n in signal.valid_signals()]
            wakeup = signal.set_wakeup_fd(-1)
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            method = multiprocessing.get_start_method(allow_none=True)
            return flag.value, number.value, handlers, wakeup, mask, method, os.umask(0o22)
        before = look()
        group = WorkerGroup("g", [WorkerSpec("misbehaving:obedient")])
        group.start()
        group.wait_ready(Deadline.after(20))
        tell(look() == before)
        group.shutdown()
        tell(look() == before)
        """
    )
    assert host.communicate()[0] == "True\nTrue\n"


def test_a_forked_child_owns_nothing_and_harms_nothing(
    group_of: Callable[..., WorkerGroup],
) -> None:
    """It cannot stop the parent's workers, holds none of their sockets, and may have its own."""
    group = group_of("obedient", "obedient")
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        verdict = "nothing raised"
        try:
            for method in (group.shutdown, group.kill, lambda: group.wait_ready(Deadline.after(1))):
                try:
                    method()
                except LifecycleError as error:
                    verdict = str(error)
            with group:  # its end must not stop the parent's
                pass
        except LifecycleError:
            sockets = 0
            for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
                try:
                    sockets += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")  # noqa: PTH115
                except OSError:
                    continue
            verdict += f" {sockets}"
        finally:
            os.write(write_end, verdict.encode())
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as file:
        verdict = file.read()
    os.waitpid(child, 0)
    assert "a forked child owns nothing" in verdict
    assert (
        int(verdict.split()[-1])
        <= sum(target.startswith("socket:") for _, target in Ledger.now().fds) - 4
    )  # keeper, wake-up pair, control sockets
    assert group.state is GroupState.READY
    assert all(alive(worker.pid or 0) for worker in group.workers)
    report = group.shutdown()
    assert report.clean


def test_a_forked_child_may_have_a_group_of_its_own(program: Run) -> None:
    host = program(
        GROUP
        + """
child = os.fork()
if child == 0:
    own = WorkerGroup("own", [WorkerSpec("misbehaving:obedient")])
    own.start()
    own.wait_ready(Deadline.after(20))
    tell(own.shutdown().clean)
    os._exit(0)
os.waitpid(child, 0)
tell(group.state.value)
group.shutdown()
"""
    )
    started(host)
    assert host.communicate()[0] == "True\nready\n"


def test_two_groups_share_one_keeper_and_one_thread(group_of: Callable[..., WorkerGroup]) -> None:
    """And the end of one leaves the other alone."""
    before = threading.active_count()
    one, two = group_of("obedient"), group_of("obedient", "obedient")
    assert threading.active_count() == before + 1
    assert one._supervisor is two._supervisor
    assert one.shutdown().clean
    assert two.state is GroupState.READY
    assert two.shutdown().clean
    assert threading.active_count() == before


def test_groups_come_and_go_in_many_threads(group_of: Callable[..., WorkerGroup]) -> None:
    """The last to leave closes the supervisor while the next one may be taking it."""
    reports: list[bool] = []

    def use() -> None:
        for _ in range(3):
            group = group_of("obedient")
            reports.append(group.shutdown(Deadline.after(5)).clean)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert reports == [True] * 12


def test_descriptors_and_threads_are_given_back(group_of: Callable[..., WorkerGroup]) -> None:
    before = Ledger.now()
    for _ in range(3):
        group = group_of("obedient", "deaf")
        group.shutdown(Deadline.after(0.3))
    gc.collect()
    left = Ledger.now().more_than(before)
    assert not left.get("fds")
    assert not left.get("threads")


def test_inside_asyncio(group_of: Callable[..., WorkerGroup]) -> None:
    """The loop's own child handling and the group do not meet."""

    async def main() -> tuple[bool, int | None]:
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[str] = loop.create_future()
        group = await asyncio.to_thread(group_of, "obedient", "deaf")
        group.on_failure(lambda cause: loop.call_soon_threadsafe(failed.set_result, cause.worker))
        other = await asyncio.create_subprocess_exec("true")
        code = await other.wait()
        os.kill(group.workers[0].pid or 0, signal.SIGKILL)
        assert await asyncio.wait_for(failed, 5) == "w0"
        report = await asyncio.to_thread(group.shutdown, Deadline.after(3))
        return bool(report.survivors), code

    assert asyncio.run(main()) == (False, 0)


def test_broken_standard_error_stops_nothing(program: Run) -> None:
    """Nobody reads the program's stderr any more (F23, F26)."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    host = program(GROUP + "group.shutdown()\ntell(group.state.value)", stderr=write_end)
    os.close(write_end)
    started(host)
    assert host.communicate()[0] == "stopped\n"


def test_a_full_standard_error_stops_nothing(program: Run) -> None:
    """Forwarded lines are dropped rather than waited for."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write_end, bytes(4096))
    os.set_blocking(write_end, True)  # whoever writes from here on waits for a reader
    host = program(
        """
        group = WorkerGroup("g", [WorkerSpec("misbehaving:floods_stderr")])
        group.start()
        group.wait_ready(Deadline.after(20))
        report = group.shutdown(Deadline.after(5))
        tell(report.workers[0].outcome, report.workers[0].last_stderr[-1])
        """,
        stderr=write_end,
    )
    os.close(write_end)
    assert host.communicate()[0] == "drained the last line\n"
    os.close(read_end)


@pytest.mark.parametrize("how", ["stopped", "frozen"])
def test_a_keeper_that_does_nothing_holds_up_no_stop(
    group_of: Callable[..., WorkerGroup], how: str
) -> None:
    """Deadline + 100 ms, whatever the keeper does; it is reaped by whoever comes next."""
    if how == "frozen" and not (os.geteuid() == 0 and FREEZER.is_dir()):
        pytest.skip("no v1 freezer cgroup here")
    group = group_of("obedient", "deaf")
    assert group._supervisor is not None
    keeper = group._supervisor.keeper.ref
    assert keeper is not None
    pid = keeper.pid
    if how == "stopped":
        keeper.send(signal.SIGSTOP)
        wait_until(lambda: state_of(pid) == "T", Deadline.after(5))
    with frozen(pid) if how == "frozen" else contextlib.nullcontext():
        deadline = Deadline.after(0.5)
        report = group.shutdown(deadline)
        assert time.monotonic() - deadline.at_s < 0.1
        assert not report.survivors
        assert not any(alive(worker.pid or 0) for worker in group.workers)
    wait_until(lambda: state_of(pid) in {"Z", ""}, Deadline.after(5))
    other = group_of("obedient")
    assert state_of(pid) == ""
    assert other.shutdown().clean


def test_few_descriptors_are_enough(program: Run) -> None:
    """A limit of 48, where descriptors above 64 cannot be had."""
    host = program(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
        with WorkerGroup("g", [WorkerSpec("misbehaving:obedient") for _ in range(2)]) as group:
            tell(group.state.value)
        tell(group.report.clean)
        """
    )
    assert host.communicate()[0] == "ready\nTrue\n"


def test_a_start_without_descriptors_gives_back_those_it_took(program: Run) -> None:
    """At each number of free ones the start fails, or succeeds, and nothing is left of it."""
    before = run_cgroups()
    host = program(
        """
        import resource
        def held():
            return len(os.listdir("/proc/self/fd"))
        before, most = held(), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        for free in range(1, 24):
            resource.setrlimit(resource.RLIMIT_NOFILE, (before - 1 + free, most))
            group = WorkerGroup("g", [WorkerSpec("misbehaving:obedient")])
            try:
                group.start()
                group.wait_ready(Deadline.after(20))
            except (OSError, StartupError, LifecycleError) as error:
                word = type(error).__name__
            else:
                word = "ready"
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            try:
                group.shutdown(Deadline.after(2))
            except NotStarted:
                pass
            tell(free, word, held() - before)
        """
    )
    lines = host.communicate()[0].splitlines()
    assert len(lines) == 23
    assert {line.split()[2] for line in lines} == {"0"}
    assert lines[0].split()[1] == "OSError"
    assert lines[-1].split()[1] == "ready"
    assert run_cgroups() <= before


def run_cgroups() -> set[Path]:
    """Find the cgroups of runs, where this host gives any."""
    own = own_cgroup()
    return set(Path(own).glob("stopbath-*")) if own is not None else set()


@pytest.mark.parametrize("end", ["stop", "worker", "program"])
def test_a_group_in_a_worker_of_a_group(program: Run, end: str) -> None:
    """It has a keeper of its own; whoever of the outer ones is killed takes all of it along."""
    host = program(
        """
        group = WorkerGroup("outer", [WorkerSpec("misbehaving:has_a_group")])
        group.start()
        group.wait_ready(Deadline.after(20))
        tell(group.workers[0].pid, *group.workers[0].info["pids"])
        sys.stdin.readline()
        tell(group.shutdown(Deadline.after(5)).workers[0].outcome)
        """
    )
    assert host.stdout is not None
    pids = [int(word) for word in host.stdout.readline().split()]
    assert len(pids) == 3
    assert all(map(alive, pids))
    if end == "stop":
        assert host.communicate("\n")[0] == "drained\n"
    elif end == "worker":
        os.kill(pids[0], signal.SIGKILL)
    else:
        host.kill()
        host.wait()
    wait_until(lambda: not any(map(alive, pids)), Deadline.after(2), f"{pids} ended")


NOTEBOOK = """
import ast, asyncio
CELLS = [
    'before = [signal.getsignal(n) for n in signal.valid_signals()]',
    'group = WorkerGroup("g", [WorkerSpec("misbehaving:deaf")], escalation=Escalation(60, 60, 1))',
    'group.start()',
    'group.wait_ready(Deadline.after(20))',
    'tell(threading.current_thread() is threading.main_thread(), group.state.value)',
    'tell("stopping"), group.shutdown()',
    'group.kill(), group.shutdown()',  # the interrupt may have come before the stop had begun
    'tell(group.report.workers[0].outcome, group.state.value)',
    'other = WorkerGroup("o", [WorkerSpec("misbehaving:obedient")])',
    'await asyncio.to_thread(other.start)',
    'await asyncio.to_thread(other.wait_ready, Deadline.after(20))',
    'tell((await asyncio.to_thread(other.shutdown)).clean)',
    'tell([signal.getsignal(n) for n in signal.valid_signals()] == before)',
]
async def kernel():
    for cell in CELLS:
        code = compile(cell, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        try:
            done = eval(code, globals())
            if done is not None:
                await done
        except KeyboardInterrupt:
            tell("interrupted")
asyncio.new_event_loop().run_until_complete(kernel())
"""


def test_in_a_notebook(program: Run) -> None:
    """Cells run on the main thread inside a running loop, and are interrupted by SIGINT."""
    host = program(NOTEBOOK)
    assert host.stdout is not None
    assert host.stdout.readline() == "True ready\n"
    assert host.stdout.readline() == "stopping\n"
    host.send_signal(signal.SIGINT)
    assert host.communicate()[0] == "interrupted\nkilled stopped\nTrue\nTrue\n"


def test_a_function_that_no_other_process_finds_is_refused(program: Run) -> None:
    """One line at the place of the mistake, in place of a worker's traceback."""
    host = program(
        """
        def work(ctx): pass
        try:
            WorkerSpec(work)
        except ValueError as error:
            tell(error)
        """
    )
    assert host.communicate()[0] == (
        "work is defined in an interactive session, where no other process finds it: "
        "put it into a module\n"
    )
