"""Pictures per second and their latencies, beside a plain server and the batched ceiling."""

from __future__ import annotations

import http.client
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from benchmarks.plain_server import READY as PLAIN_READY
from benchmarks.serving import serving
from benchmarks.stand_in import model
from benchmarks.table import Bench, Row

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BENCHES"]

CLIENTS = (1, 4, 16, 64)
STEPS = 12
ROUNDS = 3
LARGEST = 64
CEILING = "plain diffusers, one batch"
TEXT_TOKENS = 32
# As the ranks have it. Threads that spin while they wait would slow every server on a busy
# machine, the plain one most.
SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE"}


class Run(NamedTuple):
    """One measurement: pictures per second, and each picture's milliseconds."""

    rate: float
    latencies: list[float]


@contextmanager
def plain(path: str) -> Iterator[str]:
    """Run the plain server; gives its address."""
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.plain_server", path, str(TEXT_TOKENS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **SETTINGS},
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith(PLAIN_READY), "the plain server did not start"
        yield line.removeprefix(PLAIN_READY).strip()
    finally:
        server.kill()
        server.communicate()


def post(connection: http.client.HTTPConnection, path: str, **body: object) -> bytes:
    """Send one request over a connection that stays."""
    whole = {"prompt": "a red seven on blue", "num_inference_steps": STEPS, **body}
    headers = {"content-type": "application/json"}
    connection.request("POST", path, json.dumps(whole), headers)
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status == 200, content
    return content


def clients(url: str, count: int) -> Run:
    """Have `count` clients ask again and again, each when it has its picture."""
    each = max(2, 24 // count)

    def client(number: int) -> list[float]:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
        took = []
        for i in range(each):
            began = time.perf_counter()
            post(connection, "/v1/images/generations", seed=number * each + i)
            took.append((time.perf_counter() - began) * 1e3)
        connection.close()
        return took

    with ThreadPoolExecutor(count) as pool:
        began = time.perf_counter()
        latencies = [ms for took in pool.map(client, range(count)) for ms in took]
        return Run(len(latencies) / (time.perf_counter() - began), latencies)


def at_once(url: str, count: int) -> Run:
    """Have plain diffusers make `count` pictures in one batch, a few times."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
    took = [
        json.loads(post(connection, "/batch", n=count))["seconds"]
        for _ in range(max(2, 24 // count))
    ]
    connection.close()
    return Run(count * len(took) / sum(took), [seconds * 1e3 for seconds in took])


def throughput() -> Iterator[Row]:
    """All systems and all numbers of clients, in turns, so that all see the same machine."""
    with model() as name, ExitStack() as open_:
        os.environ.update(SETTINGS)
        home = Path("src/stopbath/pipelines/bundled").absolute() if name == "bundled" else name
        url = open_.enter_context(plain(str(home)))
        request = open_.enter_context(serving(name, "--mode", "request"))
        step = open_.enter_context(serving(name, "--mode", "step", "--max-batch", str(LARGEST)))
        systems = {
            "plain server": lambda count: clients(url, count),
            "request mode": lambda count: clients(request.url, count),
            "step mode": lambda count: clients(step.url, count),
            CEILING: lambda count: at_once(url, count),
        }
        runs: dict[tuple[str, int], list[Run]] = {}
        for measure in systems.values():
            measure(4)
        for _ in range(ROUNDS):
            for count in CLIENTS:
                for system, measure in systems.items():
                    runs.setdefault((system, count), []).append(measure(count))
    for count in CLIENTS:
        rates = {system: [run.rate for run in runs[system, count]] for system in systems}
        ceiling = statistics.median(rates[CEILING])
        for system, values in rates.items():
            median = statistics.median(values)
            yield Row(f"{count} client(s), {system}", median, min(values), "/s", "")
            latencies = sorted(ms for run in runs[system, count] for ms in run.latencies)
            p50 = statistics.median(latencies)
            p95 = latencies[min(len(latencies) - 1, int(len(latencies) * 0.95))]
            yield Row("  latency: median, p95", p50, p95, "ms", "")
        step_rate = statistics.median(rates["step mode"])
        goal = {1: ">= 0.95", 16: ">= 0.9"}.get(count, "")
        ratios = [a / b for a, b in zip(rates["step mode"], rates[CEILING], strict=True)]
        yield Row("  step mode / ceiling", step_rate / ceiling, min(ratios), "", goal)


BENCHES: dict[str, Bench] = {"throughput": throughput}
