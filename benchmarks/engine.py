"""The executor's calls, a step's overhead, and tensors, each beside what it is made of."""

from __future__ import annotations

import multiprocessing
import os
import select
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Any

import zmq

from benchmarks.ranks import touched
from benchmarks.table import Bench, Row, row
from stopbath.config import ServeConfig
from stopbath.executor.multiproc import MultiprocExecutor
from stopbath.lifecycle import Deadline
from stopbath.messages import GENERATE, Call, GenerationRequest, Reply
from stopbath.wire import Blob, Channel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from stopbath.executor.base import CallHandle

__all__ = ["BENCHES", "replica"]

TARGET = "benchmarks.ranks:main"
_EXTENSION = "benchmarks.ranks:extend"
START_S = 120.0
ROUNDS, CALLS = 5, 300
PARAMS = {"id": "r", "seed": 7, "prompt": "a red seven on blue"}
MIB = 1 << 20
_spawn = multiprocessing.get_context("spawn")


@contextmanager
def replica(config: ServeConfig, target: str | None = None) -> Iterator[MultiprocExecutor]:
    """Run a replica until the block ends."""
    it = MultiprocExecutor(config) if target is None else MultiprocExecutor(config, target=target)
    it.start()
    try:
        it.wait_ready(Deadline.after(START_S))
        yield it
    finally:
        it.shutdown(Deadline.after(10))


@contextmanager
def peer(target: Callable[..., None], *args: Any) -> Iterator[None]:
    """Run a process until its other end is closed."""
    process = _spawn.Process(target=target, args=args, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def echo_socket(sock: socket.socket) -> None:
    """Send back what comes."""
    while data := sock.recv(1 << 16):
        sock.sendall(data)


def echo_pipe(pipe: Connection) -> None:
    """Send back what comes."""
    while True:
        pipe.send(pipe.recv())


def echo_zmq(address: str) -> None:
    """Send back what comes."""
    sock = zmq.Context.instance().socket(zmq.DEALER)
    sock.connect(address)
    while True:
        sock.send(sock.recv())


def calls() -> Iterator[Row]:
    """Round trips: the executor over 1, 2, 4 ranks, a raw socketpair, a Pipe, and zmq.

    The executor's caller is a thread that asks and waits; a future that the main thread waits for
    costs the hand-over from the thread that reads. "channels alone": two processes that do no
    more than put the same frames on a channel and take them off, the least that is left of a call.
    """
    trips: dict[str, Callable[[], object]] = {}
    with ExitStack() as open_:
        ours, theirs = socket.socketpair()
        open_.enter_context(peer(echo_socket, theirs))
        payload = b"x" * 64

        def raw() -> None:
            ours.sendall(payload)
            ours.recv(1 << 16)

        trips["raw socketpair"] = raw
        pipe, other = _spawn.Pipe()
        open_.enter_context(peer(echo_pipe, other))

        def piped() -> None:
            pipe.send(PARAMS)
            pipe.recv()

        trips["multiprocessing.Pipe"] = piped
        trips["channels alone"] = open_.enter_context(_channel_trip())
        trips["zmq"] = open_.enter_context(_zmq_trip())
        for ranks in (1, 2, 4):
            it = open_.enter_context(replica(ServeConfig(model="none", ranks=ranks), TARGET))
            trips[f"executor, {ranks} rank(s)"] = partial(it.ask, "echo", PARAMS)
            if ranks == 1:
                trips["  through a future"] = partial(_by_future, it)
        with ThreadPoolExecutor(1) as caller:
            took = caller.submit(_interleaved, trips).result()
    base = statistics.median(took["raw socketpair"])
    for name, values in took.items():
        goal = f"<= {3 * base:.0f}" if name == "executor, 1 rank(s)" else ""
        yield row(f"round trip, {name}", values, "us", goal)


def _by_future(it: MultiprocExecutor) -> None:
    it.call("echo", PARAMS).future.result(10)


def echo_frames(sock: socket.socket) -> None:
    """Answer calls with what they brought."""
    channel: Channel[Call] = Channel(sock, Call)
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while not channel.eof:
        poll.poll()
        for call in channel.receive():
            channel.send(Reply(id=call.id, value=call.params))


@contextmanager
def _channel_trip() -> Iterator[Callable[[], object]]:
    ours, theirs = socket.socketpair()
    channel: Channel[Reply] = Channel(ours, Reply)
    poll = select.poll()
    poll.register(channel, select.POLLIN)

    def trip() -> None:
        channel.send(Call(id=1, method="echo", params=PARAMS))
        poll.poll()
        assert len(channel.receive()) == 1

    with peer(echo_frames, theirs):
        yield trip
    channel.close()


@contextmanager
def _zmq_trip() -> Iterator[Callable[[], object]]:
    sock = zmq.Context.instance().socket(zmq.DEALER)
    address = f"ipc://@stopbath-bench-{os.getpid()}"  # abstract: no file is left
    sock.bind(address)
    with peer(echo_zmq, address):
        yield lambda: (sock.send(b"x" * 64), sock.recv())
    sock.close(0)


def _interleaved(trips: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Time each in turn, in microseconds, so that the machine's moods meet all of them."""
    took: dict[str, list[float]] = {name: [] for name in trips}
    for trip in trips.values():
        for _ in range(20):
            trip()
    for _ in range(ROUNDS):
        for name, trip in trips.items():
            for _ in range(CALLS):
                began = time.perf_counter()
                trip()
                took[name].append((time.perf_counter() - began) * 1e6)
    return took


def steps() -> Iterator[Row]:
    """What a denoising step costs above the bare model call, in both modes.

    Processor time of the rank's main thread, with one thread for the model: 0.1 ms is nothing
    beside what other programs of the machine add to wall time.
    """
    count = 400
    with ExitStack() as open_:
        configs = {
            "request": ServeConfig(mode="request", worker_extension=_EXTENSION),
            "step": ServeConfig(mode="step", worker_extension=_EXTENSION),
        }
        modes = {mode: open_.enter_context(replica(it)) for mode, it in configs.items()}
        took: dict[str, list[float]] = {"bare model call": [], "request": [], "step": []}
        for _ in range(7):
            took["bare model call"].append(_value(modes["request"].call("bare", count)) * 1e3)
            for mode, it in modes.items():
                took[mode].append(_cpu_s(it, count) / count * 1e3)
    bare = took.pop("bare model call")
    yield row("bare model call, guided", bare, "ms", "")
    for mode, values in took.items():
        yield row(f"a step, {mode} mode", values, "ms", "")
        over = [value - below for value, below in zip(values, bare, strict=True)]
        yield row("  above the bare model call", over, "ms", "< 0.2")


def _cpu_s(it: MultiprocExecutor, steps: int) -> float:
    request = GenerationRequest(
        id="r",
        prompt="seven",
        width=32,
        height=32,
        seed=7,
        num_inference_steps=steps,
        guidance_scale=3.0,
    )
    before: float = _value(it.call("cpu_s", None))
    _value(it.call(GENERATE, request, ranks="first"))
    after: float = _value(it.call("cpu_s", None))
    return after - before


def _value(call: CallHandle) -> Any:
    outcome = call.future.result(120)[0]
    assert outcome.ok, outcome.traceback
    return outcome.value


def take_from_queue(tasks: Any, answers: Connection) -> None:
    """Touch what comes."""
    while True:
        answers.send(touched(memoryview(tasks.get())))


def take_from_shm(names: Connection) -> None:
    """Attach, touch and let go what is named."""
    while True:
        block = SharedMemory(name=names.recv())
        names.send(touched(block.buf))
        block.close()


def tensors() -> Iterator[Row]:
    """GB/s from this process into another that reads a byte of each page."""
    with ExitStack() as open_:
        it = open_.enter_context(replica(ServeConfig(model="none"), TARGET))
        tasks: Any = _spawn.Queue()
        answers, theirs = _spawn.Pipe()
        open_.enter_context(peer(take_from_queue, tasks, theirs))
        names, others = _spawn.Pipe()
        open_.enter_context(peer(take_from_shm, others))
        for mib in (1, 4, 16, 64, 256):
            data = bytearray(mib * MIB)
            target = bytearray(mib * MIB)
            view = memoryview(target)

            def copied(view: memoryview = view, data: bytearray = data) -> None:
                view[:] = data

            def sealed(data: bytearray = data) -> None:
                it.call("touch", Blob(data)).future.result(60)

            def queued(data: bytearray = data) -> None:
                tasks.put(data)
                answers.recv()

            def shared(data: bytearray = data) -> None:
                block = SharedMemory(create=True, size=len(data))
                block.buf[: len(data)] = data
                names.send(block.name)
                names.recv()
                block.close()
                block.unlink()

            ways = {
                "memcpy in one process": copied,
                "sealed memfd (executor)": sealed,
                "multiprocessing.Queue": queued,
                "named shared memory": shared,
            }
            rates: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(3 if mib == 256 else 7):
                for name, way in ways.items():
                    began = time.perf_counter()
                    way()
                    rates[name].append(mib * MIB / (time.perf_counter() - began) / 1e9)
            for name, values in rates.items():
                what = f"{mib} MiB, {name} (n={len(values)})"
                yield Row(what, statistics.median(values), min(values), "GB/s", "")


BENCHES: dict[str, Bench] = {"calls": calls, "steps": steps, "tensors": tensors}
