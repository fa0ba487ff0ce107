"""The whole of `stopbath serve` over ranks without a model: guardian, keeper, server, ranks."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import msgspec

import stopbath.lifecycle._guardian as guardian
from observing import wait_until
from stopbath.config import ServeConfig
from stopbath.lifecycle import Deadline

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATH = "/v1/images/generations"
WAIT_S = 20.0


def server(ctx: Any, config: dict[str, Any]) -> None:
    """Be the server process."""
    from stopbath.server import main

    raise SystemExit(main.run(ctx, config, main.executors("fake_ranks:main")))


class Answer:
    """A request under way, and when its answer came."""

    def __init__(self, client: httpx.Client, fields: dict[str, Any]) -> None:
        self._came: queue.Queue[tuple[httpx.Response, float]] = queue.Queue()

        def work() -> None:
            response = client.post(PATH, json={"prompt": "a", **fields})
            self._came.put((response, Deadline.after(0).at_s))

        threading.Thread(target=work, daemon=True).start()

    def wait(self) -> tuple[httpx.Response, float]:
        """Give the response and the monotonic second at which it came."""
        return self._came.get(timeout=WAIT_S)


class Serve:
    """A running server, as its users and its operator see it."""

    def __init__(self, folder: Path, *, target: str = "served:server", **config: Any) -> None:
        self._report = folder / "report.json"
        settings = {"port": 0, "model": "fake", "drain_s": 1.0, "terminate_s": 1.0, **config}
        job = {
            "kind": "serve",
            "name": "serve",
            "run_id": os.urandom(8).hex(),
            "worker": "server",
            "target": target,
            "args": [msgspec.to_builtins(ServeConfig(**settings).checked())],
            "path": sys.path,
            "graces_s": [8.0, 5.0, 2.0],
            "report": str(self._report),
        }
        fd = os.memfd_create("job", 0)
        os.write(fd, json.dumps(job).encode())
        os.lseek(fd, 0, os.SEEK_SET)
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, str(fd)],
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        os.close(fd)
        self.lines: list[str] = []
        self._said = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        ready = self.hear("stopbath: ready ")
        limits = httpx.Limits(max_connections=64)
        self.client = httpx.Client(base_url=ready.split()[-1], timeout=WAIT_S, limits=limits)

    def _read(self) -> None:
        for line in self.process.stderr or ():
            with self._said:
                self.lines.append(line.rstrip("\n"))
                self._said.notify_all()

    def hear(self, words: str) -> str:
        """Wait for a line on stderr that holds `words`."""
        with self._said:
            found = self._said.wait_for(lambda: [it for it in self.lines if words in it], WAIT_S)
            assert found, f"{words!r} was not said:\n" + "\n".join(self.lines)
            return found[0]

    def status(self) -> dict[str, Any]:
        """Give `/v1/status`."""
        told: dict[str, Any] = self.client.get("/v1/status").json()
        return told

    def replica(self, index: int = 0) -> dict[str, Any]:
        """Give one replica of it."""
        told: dict[str, Any] = self.status()["replicas"][index]
        return told

    def pid(self, replica: int = 0, rank: int = 0) -> int:
        """Give the pid of a rank."""
        return int(self.replica(replica)["ranks"][rank]["pid"])

    def kill(self, replica: int = 0, rank: int = 0, number: int = signal.SIGKILL) -> float:
        """Signal a rank; gives the moment."""
        pid = self.pid(replica, rank)
        os.kill(pid, number)
        return Deadline.after(0).at_s

    def ask(self, **fields: Any) -> Answer:
        """Send a request."""
        return Answer(self.client, fields)

    def running(self, count: int) -> None:
        """Wait until so many requests run."""
        by = Deadline.after(WAIT_S)
        wait_until(lambda: self.status()["queue"]["running"] == count, by)

    def ready(self, code: int) -> None:
        """Wait until readiness answers `code`."""
        by = Deadline.after(WAIT_S)
        wait_until(lambda: self.client.get("/health/ready").status_code == code, by)

    def end(self) -> int:
        """Wait for the end; the exit code."""
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return code

    def stop(self) -> int:
        """Ask for the end."""
        self.process.terminate()
        return self.end()

    @property
    def report(self) -> dict[str, Any]:
        """The account of the stop."""
        told: dict[str, Any] = json.loads(self._report.read_text())
        return told


@contextmanager
def serve(folder: Path, **config: Any) -> Iterator[Serve]:
    """Serve until the block ends."""
    running = Serve(folder, **config)
    try:
        yield running
    finally:
        running.client.close()
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait(WAIT_S)
        running._reader.join(WAIT_S)
        if running.process.stderr is not None:
            running.process.stderr.close()
