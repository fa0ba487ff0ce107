"""Runs for the tests of registry and sweep: real ones, living and dead, in a place of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from observing import wait_until
from stopbath.lifecycle import Deadline, ProcessRef

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Place", "Started", "kill_at_once", "stopbath"]

# Prints the pids of: itself, a child, one in a session of its own, and two whose parents are
# gone, the first with the environment it was born with, the second without any.
FAMILY = """
import os, subprocess, sys, time
sleep = ["sleep", "300"]
plain = subprocess.Popen(sleep)
session = subprocess.Popen(sleep, start_new_session=True)
script = '''
import subprocess, sys
how = {"start_new_session": True, "stdout": subprocess.DEVNULL}
print(subprocess.Popen(["sleep", "300"], **how, **eval(sys.argv[1])).pid)
'''
def twice(how):
    argv = [sys.executable, "-c", script, how]
    return subprocess.run(argv, stdout=subprocess.PIPE, text=True).stdout.strip()
print(os.getpid(), plain.pid, session.pid, twice("{}"), twice("{'env': {}}"), flush=True)
time.sleep(300)
"""


class Started(NamedTuple):
    """A run that was started: its front process, and the pids that its command printed."""

    front: subprocess.Popen[str]
    pids: list[int]


class Place:
    """A runtime directory that no other test knows, and what is recorded in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.env = {**os.environ, "XDG_RUNTIME_DIR": str(path), "TMPDIR": str(path)}

    def records(self) -> list[Path]:
        """Give the records that are there."""
        return sorted(self.path.glob("stopbath*/*.run"))

    def lines(self, record: Path) -> list[dict[str, Any]]:
        """Read a record."""
        return [json.loads(line) for line in record.read_text().splitlines()]

    def holders(self, record: Path) -> list[int]:
        """Give the pids of guardian (or program) and keeper."""
        return [
            line["pid"]
            for line in self.lines(record)
            if line["t"] == "process" and line["role"] != "worker"
        ]

    def start(self, script: str = FAMILY) -> Started:
        """Start a run whose command prints pids on its first line."""
        front = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "stopbath",
                "run",
                "--name",
                "dead",
                "--",
                sys.executable,
                "-c",
                script,
            ],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert front.stdout is not None
        line = front.stdout.readline()
        front.stdout.close()
        return Started(front, [int(word) for word in line.split()])

    def die_at_once(self, record: Path) -> None:
        """Kill both holders in the same instant: neither runs between the two signals."""
        kill_at_once(self.holders(record))

    def dead_run(self, script: str = FAMILY) -> Started:
        """Give a run whose guardian and keeper are dead."""
        known = set(self.records())
        started = self.start(script)
        (record,) = set(self.records()) - known
        self.die_at_once(record)
        started.front.wait(5)
        return started


def kill_at_once(pids: list[int]) -> None:
    """Stop all, then kill all: none of them sees another's end."""
    refs = [ProcessRef.open(pid) for pid in pids]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for ref in refs:
            ref.send(number)
    for ref in refs:
        wait_until(ref.dead, Deadline.after(5))
        ref.close()


def stopbath(place: Place, *args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end, without a terminal."""
    done = subprocess.run(
        [sys.executable, "-m", "stopbath", *args],
        env=place.env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done
