"""Memory over a thousand requests, and processor time per picture, of server and rank."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import psutil

from benchmarks.serving import rank_pids, serving
from benchmarks.table import Bench, Row, row
from benchmarks.throughput import clients, plain

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BENCHES", "pss_mb"]

MODES = ("request", "step")
WARM_UP, REQUESTS = 50, 1000
CLIENTS, ROUNDS = 8, 3


def pss_mb(pid: int) -> float:
    """Give a process's proportional set size in MB: a page that n processes share counts 1/n."""
    return float(psutil.Process(pid).memory_full_info().pss) / 2**20


def cpu_s(pid: int) -> float:
    """Give the processor time that a process has used, in seconds."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def memory() -> Iterator[Row]:
    """Pss of server and rank after a warm-up, and after a thousand more requests."""
    for mode in MODES:
        with serving("--mode", mode) as it:
            status = it.get("/v1/status")
            pids = {"server": status["server_pid"], "rank": rank_pids(status)[0]}
            ask(it.url, WARM_UP)
            before = {who: pss_mb(pid) for who, pid in pids.items()}
            ask(it.url, REQUESTS)
            for who, pid in pids.items():
                after = pss_mb(pid)
                yield Row(
                    f"{mode} mode, {who}: after {WARM_UP} requests", *[before[who]] * 2, "MB", ""
                )
                yield Row(f"  after {REQUESTS} more", after, after, "MB", "")


def ask(url: str, count: int) -> None:
    """Have at least `count` pictures of one step made, by several clients."""
    made = 0
    while made < count:
        made += len(clients(url, CLIENTS, steps=1).latencies)


def processor() -> Iterator[Row]:
    """Processor time per picture of each process, beside that of a plain server."""
    with ExitStack() as open_:
        plainly = open_.enter_context(plain())
        ours = {mode: open_.enter_context(serving("--mode", mode)) for mode in MODES}
        watched = {"plain server": (plainly.url, {"": plainly.pid})}
        for mode, it in ours.items():
            status = it.get("/v1/status")
            pids = {", server": status["server_pid"], ", rank": rank_pids(status)[0]}
            watched[f"{mode} mode"] = it.url, pids
        took: dict[str, list[float]] = {
            system + who: [] for system, (_, pids) in watched.items() for who in pids
        }
        for _ in range(ROUNDS):
            for system, (url, pids) in watched.items():
                before = {who: cpu_s(pid) for who, pid in pids.items()}
                made = len(clients(url, CLIENTS).latencies)
                for who, pid in pids.items():
                    took[system + who].append((cpu_s(pid) - before[who]) / made * 1e3)
        for what, values in took.items():
            yield row(f"CPU time per picture, {what}", values, "ms", "")


BENCHES: dict[str, Bench] = {"memory": memory, "processor": processor}
