"""The first instants of a process: who its parent is, what dies with whom, who hears signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import stopbath.lifecycle
from observing import alive, wait_until
from stopbath.lifecycle import Deadline, Exit, ProcessRef
from stopbath.lifecycle._process import peek_exit, reap

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("nothing_left")

CHILD = Path(stopbath.lifecycle.__file__).parent / "_child.py"


@pytest.mark.parametrize("late", [False, True])
def test_a_worker_whose_parent_died_before_it_armed_leaves(late: bool) -> None:  # noqa: FBT001
    """It compares its parent with the one it was given: a subreaper is no PID 1 (F15)."""
    ours, theirs = socket.socketpair()
    parent = os.getpid() if not late else 1 << 21  # nobody's: the largest number is below it
    argv = [sys.executable, "-I", "-S", str(CHILD), "w0", "3", "kernel", "3", str(parent)]
    actions = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)]
    ref = ProcessRef.open(os.posix_spawn(argv[0], argv, os.environ, file_actions=actions))
    theirs.close()
    try:
        if late:
            assert ref.dead(wait_s=5)
            assert peek_exit(ref) == Exit(code=1)
        else:
            ours.settimeout(5)
            assert ours.recv(1)  # it says hello
    finally:
        ours.close()
        ref.send(signal.SIGKILL)
        assert ref.dead(wait_s=5)
        reap(ref)
        ref.close()


def test_a_worker_in_c_dies_with_program_and_keeper(
    program: Callable[..., subprocess.Popen[str]],
) -> None:
    """Killed in the same instant: only the kernel is left to end one that runs no Python."""
    host = program(
        """
        group = WorkerGroup("g", [WorkerSpec("misbehaving:in_a_c_call")])
        group.start()
        group.wait_ready(Deadline.after(20))
        tell(group.workers[0].pid, group._supervisor.keeper.ref.pid)
        threading.Event().wait()
        """
    )
    assert host.stdout is not None
    worker, keeper = (int(word) for word in host.stdout.readline().split())
    refs = [ProcessRef.open(pid) for pid in (keeper, host.pid)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for ref in refs:
            ref.send(number)
    for ref in refs:
        ref.close()
    host.wait(5)
    by = Deadline.after(2)
    try:
        wait_until(lambda: not alive(worker), by, "the worker died with them")
    finally:
        if alive(worker):
            os.kill(worker, signal.SIGKILL)
    sweep = [sys.executable, "-m", "stopbath", "sweep", "--yes"]
    subprocess.run(sweep, check=True, capture_output=True)


def test_whoever_has_a_keeper_hears_signals(tmp_path: Path) -> None:
    """From the first process it has started on, a SIGTERM is a request, and is accounted for."""
    report = tmp_path / "report.json"
    for _ in range(3):
        report.unlink(missing_ok=True)
        run = subprocess.Popen(
            [sys.executable, "-m", "stopbath", "run", "--report", str(report), "--", "sleep", "60"],
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

        def has_keeper() -> bool:
            return any('"keeper"' in path.read_text() for path in tmp_path.glob("stopbath/*.run"))

        wait_until(has_keeper, Deadline.after(10))
        run.send_signal(signal.SIGTERM)
        assert run.wait(5) == 128 + signal.SIGTERM
        assert json.loads(report.read_text())["asked_by"] == "SIGTERM"
