"""Workers whose owners are killed, with the parent-death signal switched off: the portable way.

The workers wait for the end of two descriptors in place of the kernel's signal, which is what
there is on a system without prctl(2). Each says which signal it has armed: none.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

import stopbath.lifecycle
from observing import alive, run_processes, state_of, wait_until
from stopbath.lifecycle import Deadline, Policy, ProcessRef, WorkerGroup, WorkerSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from guarded import Run

pytestmark = pytest.mark.usefixtures("nothing_left")

BOUND_S = 2.0
CHILD = Path(stopbath.lifecycle.__file__).parent / "_child.py"
SITS = ("in python", "in c", "in a signal wait")
GROUP = """
group = WorkerGroup("g", [
    WorkerSpec(
        "misbehaving:tells_how_it_is_armed",
        args=(sits,),
        parent_death={how!r},
        preload={preload!r},
    )
    for sits in {sits!r}
], policy=Policy.INDEPENDENT)
group.start()
group.wait_ready(Deadline.after(20))
tell(group._supervisor.keeper.ref.pid)
for worker in group.workers:
    tell(worker.info["armed"], worker.pid, worker.info["helper"])
threading.Event().wait()
"""


class Tree(NamedTuple):
    """Who is who, in a program with a group."""

    program: subprocess.Popen[str]
    keeper: int
    workers: list[int]
    helpers: list[int]


@pytest.fixture(params=[(), ("born",)], ids=["executed", "forked"])
def tree(
    request: pytest.FixtureRequest, program: Callable[..., subprocess.Popen[str]]
) -> Iterator[Callable[..., Tree]]:
    """Make a program with a group whose workers have no parent-death signal, and helpers."""
    everybody: list[int] = []

    def make(how: str = "socket", armed: int = 0) -> Tree:
        host = program(GROUP.format(how=how, sits=SITS, preload=request.param))
        assert host.stdout is not None
        keeper = int(host.stdout.readline())
        told = [[int(word) for word in host.stdout.readline().split()] for _ in SITS]
        assert [it[0] for it in told] == [armed] * len(SITS)
        workers, helpers = [it[1] for it in told], [it[2] for it in told]
        everybody.extend([keeper, *workers, *helpers])
        assert all(alive(pid) for pid in everybody)
        return Tree(host, keeper, workers, helpers)

    yield make
    for pid in filter(alive, everybody):
        os.kill(pid, signal.SIGKILL)


def halted(pid: int) -> None:
    """Keep a process from doing anything about the deaths of others."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state_of(pid) == "T", Deadline.after(5))


def ended(pids: list[int]) -> None:
    wait_until(lambda: not any(map(alive, pids)), Deadline.after(BOUND_S), f"{pids} have ended")


def sweep() -> None:
    """Remove the record of a run of which nobody was left to do so."""
    argv = [sys.executable, "-m", "stopbath", "sweep", "--yes"]
    subprocess.run(argv, check=True, capture_output=True)


def test_the_default_here_is_the_kernels_way(tree: Callable[..., Tree]) -> None:
    """The workers' word for what is armed means something: it is SIGKILL where it is on."""
    it = tree("kernel", armed=signal.SIGKILL)
    it.program.kill()
    ended([*it.workers, *it.helpers])
    assert WorkerSpec("m:f").parent_death == ("kernel" if sys.platform == "linux" else "socket")


def test_a_program_that_is_killed(tree: Callable[..., Tree]) -> None:
    """Workers and helpers go while the keeper can do nothing about it."""
    it = tree()
    halted(it.keeper)
    it.program.kill()
    it.program.wait()
    ended([*it.workers, *it.helpers])
    os.kill(it.keeper, signal.SIGCONT)
    wait_until(lambda: not run_processes(), Deadline.after(BOUND_S), "the keeper left")


def test_a_keeper_that_is_killed(tree: Callable[..., Tree]) -> None:
    """Workers and helpers go while the program can do nothing about it."""
    it = tree()
    halted(it.program.pid)
    os.kill(it.keeper, signal.SIGKILL)
    ended([*it.workers, *it.helpers])


def test_program_and_keeper_killed_in_the_same_instant(tree: Callable[..., Tree]) -> None:
    """Nobody at all is left to end the workers."""
    it = tree()
    halted(it.program.pid)
    halted(it.keeper)
    os.kill(it.keeper, signal.SIGKILL)
    it.program.kill()
    it.program.wait()
    ended([*it.workers, *it.helpers])
    sweep()


def test_an_independent_group_ends_when_its_keeper_does(
    group_of: Callable[..., WorkerGroup],
) -> None:
    """Also a worker that no signal of the kernel ends and whose interpreter is locked."""
    locked = ("in_a_c_call", {"parent_death": "socket"})
    group = group_of(locked, "obedient", policy=Policy.INDEPENDENT)
    pids = [worker.pid or 0 for worker in group.workers]
    assert group._supervisor is not None
    keeper = group._supervisor.keeper.ref
    assert keeper is not None
    keeper.send(signal.SIGKILL)
    ended(pids)
    assert group.shutdown(Deadline.after(2)).cause is not None


@pytest.mark.parametrize("who", ["control", "lifeline"])
def test_a_worker_that_waits_for_go_ends_with_its_owner(who: str) -> None:
    """From its first instants on, before anything of the user's is imported."""
    ours, theirs = socket.socketpair()
    read_end, write_end = os.pipe()
    argv = [sys.executable, "-I", "-S", str(CHILD), "w0", "3", "3,5", "3,5", str(os.getpid())]
    actions = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), 3), (os.POSIX_SPAWN_DUP2, read_end, 5)]
    ref = ProcessRef.open(
        os.posix_spawn(argv[0], argv, os.environ, file_actions=actions, setsid=True)
    )
    theirs.close()
    os.close(read_end)
    try:
        ours.settimeout(5)
        assert ours.recv(1)  # it says hello
        assert not ref.dead()
        if who == "control":
            ours.close()
        else:
            os.close(write_end)
        assert ref.dead(wait_s=BOUND_S)
    finally:
        ours.close()
        if who == "control":
            os.close(write_end)
        ref.send(signal.SIGKILL)
        assert ref.dead(wait_s=5)
        os.waitpid(ref.pid, 0)
        ref.close()


@pytest.mark.parametrize("who", ["guardian", "keeper", "server"])
def test_a_server_whose_tree_is_cut(guard: Callable[..., Run], who: str) -> None:
    """Each of the three is killed while the one that would clean up after it is halted."""
    run = guard(ranks="tells_how_it_is_armed", parent_death="socket")
    armed = [int(line.split()[1]) for line in run.said if line.startswith("armed ")]
    assert armed == [0, 0, 0], "server and both ranks"
    others = {"guardian": "keeper", "keeper": "guardian", "server": "keeper"}
    try:
        halted(run.pids[others[who]])
        if who == "keeper":
            halted(run.pids["server"])
        run.kill(who)
        ended([run.pids["rank0"], run.pids["rank1"]])
        with contextlib.suppress(ProcessLookupError):
            run.kill("server", signal.SIGCONT)
        run.kill(others[who], signal.SIGCONT)
        run.ended()
    finally:
        for pid in filter(alive, run.pids.values()):
            os.kill(pid, signal.SIGKILL)
