"""`stopbath serve` with the bundled model: start, pictures, and the end by `kill -9`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx

from benchmarks.lifecycle import until_dead
from benchmarks.table import Bench, Row, row
from stopbath.lifecycle import ProcessRef

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BENCHES", "Serving", "rank_pids", "serving"]

READY = "stopbath: ready "


class Serving(NamedTuple):
    """A running server: its address, its guardian, and how long it took to be ready (seconds)."""

    url: str
    guardian: subprocess.Popen[str]
    ready_s: float

    def get(self, path: str) -> Any:
        """Read a JSON answer."""
        return httpx.get(f"{self.url}{path}", timeout=30).raise_for_status().json()

    def picture(self, prompt: str = "a seven") -> float:
        """Ask for one picture; gives the seconds it took."""
        began = time.perf_counter()
        answer = httpx.post(
            f"{self.url}/v1/images/generations", json={"prompt": prompt}, timeout=60
        )
        answer.raise_for_status()
        return time.perf_counter() - began


@contextmanager
def serving(*options: str) -> Iterator[Serving]:
    """Run `stopbath serve` on a free port, and end it."""
    began = time.perf_counter()
    guardian = subprocess.Popen(
        [sys.executable, "-m", "stopbath", "serve", "--port", "0", *options],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert guardian.stderr is not None
    try:
        for line in guardian.stderr:
            if line.startswith(READY):
                yield Serving(
                    line.removeprefix(READY).strip(), guardian, time.perf_counter() - began
                )
                break
        else:
            raise RuntimeError(f"the server ended before it was ready: {guardian.wait()}")
    finally:
        guardian.terminate()
        guardian.stderr.read()
        guardian.wait(30)


def pictures() -> Iterator[Row]:
    """First picture and steady pictures per second, one rank and two."""
    for ranks in (1, 2):
        with serving("--ranks", str(ranks)) as server:
            yield Row(f"{ranks} rank(s): time to ready", server.ready_s, server.ready_s, "s", "")
            first = server.picture()
            yield Row("  first picture", first * 1e3, first * 1e3, "ms", "")
            yield row(
                "  a picture, one client", [server.picture() * 1e3 for _ in range(40)], "ms", ""
            )
            for clients in (1, 4):
                rates = [_rate(server, clients) for _ in range(3)]
                yield row(f"  pictures per second, {clients} client(s)", rates, "/s", "")


def _rate(server: Serving, clients: int, count: int = 48) -> float:
    with ThreadPoolExecutor(clients) as pool:
        began = time.perf_counter()
        list(pool.map(lambda _: server.picture(), range(count)))
        return count / (time.perf_counter() - began)


def server_death() -> Iterator[Row]:
    """From SIGKILL of the server process to the end of its last rank.

    Beside it what the kernel needs for its part: to take apart the same two ranks, idle, killed
    directly. The rest is the server's own end, which the kernel has to finish before anybody can
    see it, and ours: to notice, and to kill the ranks.
    """
    took: dict[str, list[float]] = {"server": [], "ranks": []}
    for _ in range(5):
        for who, values in took.items():
            with serving("--ranks", "2") as server:
                status = server.get("/v1/status")
                ranks = rank_pids(status)
                refs = [ProcessRef.open(pid) for pid in ranks]
                began = time.perf_counter()
                for pid in [status["server_pid"]] if who == "server" else ranks:
                    os.kill(pid, signal.SIGKILL)
                values.append(until_dead(refs, began))
    yield row("kill -9 of the server: last of 2 ranks gone", took["server"], "ms", "< 50")
    yield row("  the kernel's part: both ranks killed", took["ranks"], "ms", "")
    pairs = zip(took["server"], took["ranks"], strict=True)
    yield row("  the rest: its own end, then ours", [all_ - its for all_, its in pairs], "ms", "")


def rank_pids(status: Any) -> list[int]:
    """Give the pids of all ranks, from `/v1/status`."""
    return [rank["pid"] for replica in status["replicas"] for rank in replica["ranks"]]


BENCHES: dict[str, Bench] = {"pictures": pictures, "server": server_death}
