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
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from benchmarks.plain_server import READY as PLAIN_READY
from benchmarks.serving import serving
from benchmarks.table import Bench, Row
from stopbath.config import BUNDLED, model_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["BENCHES", "clients", "plain", "post"]

CLIENTS = (1, 4, 16, 64)
STEPS, GUIDANCE = 12, 3.0
ROUNDS = 3
LARGEST = 64
STEP_MODE = "step mode"
CEILING = "plain diffusers, one batch"
# As the ranks have it. Threads that spin while they wait would slow every server on a busy
# machine, the plain one most.
SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE"}


class Run(NamedTuple):
    """One measurement: pictures per second, and each picture's milliseconds."""

    rate: float
    latencies: list[float]


class Plain(NamedTuple):
    """The plain server: its address and its process."""

    url: str
    pid: int


@contextmanager
def plain() -> Iterator[Plain]:
    """Run the plain server, with as many text tokens as ours has."""
    path = model_path(BUNDLED)
    tokens = json.loads((path / "stopbath.json").read_text())["max_sequence_length"]
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.plain_server", str(path), str(tokens)],
        stdin=subprocess.PIPE,  # its end ends the server, however this process ends
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **SETTINGS},
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith(PLAIN_READY), "the plain server did not start"
        yield Plain(line.removeprefix(PLAIN_READY).strip(), server.pid)
    finally:
        server.kill()
        server.communicate()


def post(connection: http.client.HTTPConnection, path: str, **body: object) -> bytes:
    """Send one request over a connection that stays."""
    whole = {"prompt": "a red seven on blue", "num_inference_steps": STEPS}
    whole |= {"guidance_scale": GUIDANCE, **body}
    headers = {"content-type": "application/json"}
    connection.request("POST", path, json.dumps(whole), headers)
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status == 200, content
    return content


def clients(url: str, count: int, steps: int = STEPS) -> Run:
    """Have `count` clients ask again and again, each when it has its picture."""
    each = max(2, 24 // count)

    def client(number: int) -> list[float]:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
        took = []
        for i in range(each):
            began = time.perf_counter()
            told = {"seed": number * each + i, "num_inference_steps": steps}
            post(connection, "/v1/images/generations", **told)
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
    with ExitStack() as open_:
        os.environ.update(SETTINGS)
        url = open_.enter_context(plain()).url
        request = open_.enter_context(serving("--mode", "request"))
        step = open_.enter_context(serving("--mode", "step", "--max-batch", str(LARGEST)))
        systems: dict[str, Callable[[int], Run]] = {
            "plain server": lambda count: clients(url, count),
            "request mode": lambda count: clients(request.url, count),
            STEP_MODE: lambda count: clients(step.url, count),
            CEILING: lambda count: at_once(url, count),
        }
        for measure in systems.values():
            measure(4)
        for count in CLIENTS:
            runs: dict[str, list[Run]] = {system: [] for system in systems}
            for _ in range(ROUNDS):
                for system, measure in systems.items():
                    runs[system].append(measure(count))
            yield from _rows(count, runs)


def _rows(count: int, runs: dict[str, list[Run]]) -> Iterator[Row]:
    for system, several in runs.items():
        rates = [run.rate for run in several]
        yield Row(f"{count} client(s), {system}", statistics.median(rates), min(rates), "/s", "")
        latencies = sorted(ms for run in several for ms in run.latencies)
        p95 = latencies[min(len(latencies) - 1, int(len(latencies) * 0.95))]
        yield Row("  latency: median, p95", statistics.median(latencies), p95, "ms", "")
    # Round by round: the machine's mood is the same for both then.
    pairs = zip(runs[STEP_MODE], runs[CEILING], strict=True)
    ratios = [ours.rate / theirs.rate for ours, theirs in pairs]
    goal = {1: ">= 0.95", 16: ">= 0.9"}.get(count, "")
    yield Row("  step mode / one batch", statistics.median(ratios), min(ratios), "", goal)


BENCHES: dict[str, Bench] = {"throughput": throughput}
