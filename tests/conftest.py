"""What tests of every folder share: the check that nothing is left, groups, host programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from observing import COOKIE, Ledger, wait_until
from stopbath.lifecycle import Deadline, Escalation, NotStarted, WorkerGroup, WorkerSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

os.environ[COOKIE] = "1"
# A shell starts background jobs with SIGINT and SIGQUIT ignored, nohup ignores SIGHUP: every
# program under test would inherit that. What a handler catches is at its default after an exec.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)

QUICK = Escalation(drain_s=0.25, terminate_s=0.25, kill_s=2.0)
_HEADER = """
import os, signal, sys, threading
import misbehaving
from stopbath.lifecycle import *

def tell(*words):
    print(*words, flush=True)

"""


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fail a test that leaves a process, shared memory, a descriptor or a thread.

    A module of process tests asks for it once:
    `pytestmark = pytest.mark.usefixtures("nothing_left")`.
    """
    before = Ledger.now()
    yield
    try:
        wait_until(lambda: not Ledger.now().more_than(before), Deadline.after(3))
    except AssertionError:
        pytest.fail(f"left behind: {Ledger.now().more_than(before)}")


@pytest.fixture
def group_of(nothing_left: None) -> Iterator[Callable[..., WorkerGroup]]:  # noqa: ARG001  (runs around this)
    """Make groups, ready ones unless told otherwise; what a test does not stop is killed.

    `group_of("deaf", "obedient")` has a worker for each name in `misbehaving`; a name may come
    with the fields of its `WorkerSpec`, as in `("waits_for", {"args": ("kill",)})`.
    """
    made: list[WorkerGroup] = []

    def make(*workers: Any, start: bool = True, ready: bool = True, **options: Any) -> WorkerGroup:
        specs = []
        for i, worker in enumerate(workers):
            target, fields = worker if isinstance(worker, tuple) else (worker, {})
            where = target if ":" in target else f"misbehaving:{target}"
            specs.append(WorkerSpec(where, **{"name": f"w{i}", **fields}))
        group = WorkerGroup("test", specs, **{"escalation": QUICK, **options})
        made.append(group)
        if start:
            group.start()
            if ready:
                group.wait_ready(Deadline.after(20))
        return group

    yield make
    for group in made:
        try:
            group.kill()
            group.shutdown(Deadline.after(5))
        except NotStarted:
            continue


@pytest.fixture
def program(nothing_left: None) -> Iterator[Callable[..., subprocess.Popen[str]]]:  # noqa: ARG001  (runs around this)
    """Run code as a program of its own, with this layer and `misbehaving` imported.

    It speaks over `stdout` with `tell(...)`, and hears over `stdin`.
    """
    running: list[subprocess.Popen[str]] = []
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])

    def run(code: str, **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _HEADER + textwrap.dedent(code)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            **options,
        )
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()
