"""The guardian, run by path as `serve` does, over `misbehaving.serves_ranks` as its server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stopbath.lifecycle
from observing import alive, run_processes, wait_until
from stopbath.lifecycle import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GUARDIAN = Path(stopbath.lifecycle.__file__).parent / "_guardian.py"
RANK_GRACES = (0.3, 0.3, 1.0)


class Run:
    """One guardian, its tree, and what it said."""

    def __init__(self, process: subprocess.Popen[str], report: Path) -> None:
        self.process = process
        self.pids: dict[str, int] = {"guardian": process.pid}
        self.strays: list[int] = []
        self.said: list[str] = []
        self._report = report

    def hear(self, word: str) -> str:
        """Read stderr up to the line that begins with `word`."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line.rstrip())
            if line.startswith(word):
                return line.removeprefix(word)
        pytest.fail(f"it ended without {word!r}: {self.said}")

    def ready(self) -> Run:
        """Wait until ranks are ready; learn who is who."""
        for i, word in enumerate(self.hear("ready ").split()):
            self.pids[f"rank{i}"] = int(word)
        server, keeper, _ = (int(word) for word in self.hear("tree ").split())
        self.pids |= {"server": server, "keeper": keeper}
        strays = [line for line in self.said if line.startswith("stray ")]
        self.strays = [int(line.split()[1]) for line in strays]
        return self

    def kill(self, who: str, number: int = signal.SIGKILL) -> None:
        """Signal one of them."""
        os.kill(self.pids[who], number)

    def ended(self, by_s: float = 5) -> int:
        """Wait for the end; nothing of the run is left then, or very soon."""
        assert self.process.stderr is not None
        self.said += self.process.stderr.read().splitlines()
        code = self.process.wait(by_s)
        by, pids = Deadline.after(2), [*self.pids.values(), *self.strays]
        wait_until(lambda: not any(alive(pid) for pid in pids), by, f"nothing left of {self.pids}")
        wait_until(lambda: not run_processes(), by, f"nothing left beside {self.pids}")
        return code

    @property
    def report(self) -> dict[str, Any]:
        """The report file."""
        return json.loads(self._report.read_text())

    def outcomes(self) -> dict[str, str]:
        """What ended whom, by the report."""
        return {worker["name"]: worker["outcome"] for worker in self.report["workers"]}


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start guardians; what a test does not end is killed."""
    runs: list[Run] = []

    def start(
        target: str = "serves_ranks",
        ranks: str = "obedient",
        *,
        graces: tuple[float, ...] = RANK_GRACES,
        outer: tuple[float, ...] = (4.0, 2.5, 1.0),
        report: Path | None = None,
        wrapper: tuple[str, ...] = (),
        parent_death: str = "kernel",
        preload: tuple[str, ...] = (),
        ledger: tuple[str, ...] = (),
    ) -> Run:
        fields = {"parent_death": parent_death, "preload": preload}
        serves = [2, f"misbehaving:{ranks}", graces, fields]
        job = {
            "kind": "serve",
            "name": "serve",
            "run_id": f"test{os.getpid()}x{len(runs)}",
            "worker": "server",
            "target": f"misbehaving:{target}",
            "args": serves if target == "serves_ranks" else [],
            "path": sys.path,
            "graces_s": outer,
            "report": str(report or tmp_path / "report.json"),
            "parent_death": parent_death,
            "ledger": ledger,
        }
        fd = os.memfd_create("job", 0)
        os.write(fd, json.dumps(job).encode())
        os.lseek(fd, 0, os.SEEK_SET)
        process = subprocess.Popen(
            [*wrapper, sys.executable, "-I", "-S", str(GUARDIAN), str(fd)],
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        os.close(fd)
        run = Run(process, report or tmp_path / "report.json")
        runs.append(run)
        return run.ready() if target == "serves_ranks" else run

    yield start
    for run in runs:
        run.process.kill()
        run.process.wait()
        assert run.process.stderr is not None
        run.process.stderr.close()
