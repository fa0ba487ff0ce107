"""Memory over a thousand requests, and processor time per picture, of server and rank."""

from __future__ import annotations

import http.client
import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import psutil

from benchmarks.serving import rank_pids, serving
from benchmarks.table import Bench, Row, row
from benchmarks.throughput import clients, plain, post

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.serving import Serving

__all__ = ["BENCHES", "pss_mb"]

MODES = ("request", "step")
WARM_UP, REQUESTS = 50, 1000
CLIENTS, ROUNDS = 8, 3


def pss_mb(pid: int) -> float:
    """Give a process's proportional set size in MB: a page that n processes share counts 1/n."""
    return _rollup_mb(pid)["Pss"]


def fileless_mb(pid: int) -> float:
    """Give the part of it that no file stands behind: the heap, stacks, shared memory.

    What other programs do to our share of a library's pages does not move it.
    """
    kinds = _rollup_mb(pid)
    return kinds["Pss_Anon"] + kinds["Pss_Shmem"]


def _rollup_mb(pid: int) -> dict[str, float]:
    _, *lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return {kind.rstrip(":"): int(kb) / 1024 for kind, kb, _ in map(str.split, lines)}


def cpu_s(pid: int) -> float:
    """Give the processor time that a process has used, in seconds."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class _Pids(NamedTuple):
    """The processes of one server, by what they are."""

    server: list[int]
    ranks: list[int]

    @classmethod
    def of(cls, it: Serving) -> _Pids:
        status = it.get("/v1/status")
        return cls([status["server_pid"]], rank_pids(status))

    def per(self, measure: Callable[[int], float]) -> dict[str, float]:
        """Measure the server, the ranks, and all together."""
        server, ranks = (sum(map(measure, pids)) for pids in self)
        return {"server": server, "rank": ranks, "both": server + ranks}


def memory() -> Iterator[Row]:
    """Pss of server and rank after a warm-up, and after a thousand more requests.

    The goal is for memory without a file: a program that ends elsewhere leaves its share of
    torch's pages to us, and that is no growth of ours.
    """
    for mode in MODES:
        with serving("--mode", mode) as it:
            pids = _Pids.of(it)
            ask(it.url, WARM_UP)
            before, fileless = pids.per(pss_mb), pids.per(fileless_mb)
            ask(it.url, REQUESTS)
            after, fileless_after = pids.per(pss_mb), pids.per(fileless_mb)
        for who, was in before.items():
            grown = fileless_after[who] - fileless[who]
            yield _single(f"{mode} mode, {who}: Pss after {WARM_UP} requests", was)
            yield _single(f"  after {REQUESTS} more", after[who])
            yield _single("  growth", after[who] - was)
            yield _single("  growth of what is no file's", grown, "< 20" if who == "both" else "")


def _single(what: str, value: float, goal: str = "") -> Row:
    return Row(what, value, value, "MB", goal)


def ask(url: str, count: int) -> None:
    """Have at least `count` pictures of one step made, by several clients."""
    made = 0
    while made < count:
        made += len(clients(url, CLIENTS, steps=1).latencies)


def processor() -> Iterator[Row]:
    """Processor time per picture of each process, beside plain diffusers and a plain server."""
    with ExitStack() as open_:
        plainly = open_.enter_context(plain())
        ours = {mode: open_.enter_context(serving("--mode", mode)) for mode in MODES}
        systems: dict[str, Callable[[], dict[str, float]]] = {
            "diffusers, a loop": lambda: {"": looped(plainly.url, 1)},
            f"diffusers, {CLIENTS} in one": lambda: {"": looped(plainly.url, CLIENTS)},
            "plain server": lambda: served(plainly.url, lambda: {"": cpu_s(plainly.pid)}),
        }
        for mode, it in ours.items():
            used = partial(_Pids.of(it).per, cpu_s)
            systems[f"{mode} mode, "] = partial(served, it.url, used)
        took: dict[str, list[float]] = {}
        for number in range(-1, ROUNDS):
            for system, measure in systems.items():
                for who, value in measure().items():
                    if number >= 0:  # the first round warms up
                        took.setdefault(system + who, []).append(value)
        for what, values in took.items():
            yield row(f"CPU a picture: {what}", values, "ms", "")


def served(url: str, used: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Have clients ask a server; gives the milliseconds of processor time per picture."""
    before = used()
    made = len(clients(url, CLIENTS).latencies)
    return {who: (after - before[who]) / made * 1e3 for who, after in used().items()}


def looped(url: str, count: int) -> float:
    """Have plain diffusers make `count` pictures at a time; milliseconds of it per picture."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
    times = max(2, 24 // count)
    told = [json.loads(post(connection, "/batch", n=count)) for _ in range(times)]
    connection.close()
    return float(sum(it["cpu_seconds"] for it in told)) / (times * count) * 1e3


BENCHES: dict[str, Bench] = {"memory": memory, "processor": processor}
