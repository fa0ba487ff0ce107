"""Ranks without a model, for tests of the executor: real processes that start in 50 ms.

Named as the executor's `target`; `model` of the config says what goes wrong at the start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stopbath.messages import ModelInfo
from stopbath.pipelines.base import Cancelled, PeerLost
from stopbath.worker.loop import CallWatch, RankLoop

if TYPE_CHECKING:
    from stopbath.lifecycle import WorkerContext

INFO = ModelInfo(
    pipeline="Fake",
    family="fake",
    width=8,
    height=8,
    size_multiple=8,
    max_width=8,
    max_height=8,
    num_inference_steps=1,
    guidance_scale=1.0,
    max_prompt_tokens=1,
    device="cpu",
)


def _infos() -> dict[str, Any]:
    return {name: getattr(INFO, name) for name in INFO.__struct_fields__}


def hold(_params: Any, watch: CallWatch) -> None:
    """Compute until cancelled, and say so once."""
    watch.progress(1, 1)
    while not watch.cancelled:
        time.sleep(0.002)
    raise Cancelled("given up")


def brood(_params: Any, watch: CallWatch) -> None:
    """Compute until cancelled without a word."""
    while not watch.cancelled:
        time.sleep(0.002)
    raise Cancelled("given up")


def lose(rank: int) -> Any:
    """Say that the peers are gone, on rank 0; rank 1 holds."""

    def method(params: Any, watch: CallWatch) -> None:
        if rank:
            hold(params, watch)
        raise PeerLost("rank0 lost its peers")

    return method


def freeze(_params: Any, watch: CallWatch) -> None:
    """Stop the whole process, as a debugger or a full cgroup would."""
    watch.progress(1, 1)
    os.kill(os.getpid(), signal.SIGSTOP)


def fails(rank: int) -> Any:
    """Raise on rank 1."""

    def method(params: Any, _watch: CallWatch) -> Any:
        if rank:
            raise LookupError("no such layer")
        return params

    return method


def paced(params: Any, watch: CallWatch) -> str:
    """Make so many steps of 20 ms."""
    for step in range(params):
        time.sleep(0.02)  # the work
        watch.progress(step + 1, params)
    return "done"


def hold_gil(params: Any, watch: CallWatch) -> str:
    """Hold the interpreter in C for so many seconds, in which no thread of the rank can run."""
    watch.progress(1, 2)
    ctypes.PyDLL(None).usleep(round(params * 1e6))
    return "done"


def lost_in_c(_params: Any, watch: CallWatch) -> None:
    """Hold the interpreter in C for ever."""
    watch.progress(1, 2)
    sum(range(10**12))


def meet(rank: int) -> Any:
    """Wait for a peer as in a collective; rank 1 is stopped before it comes."""

    def wait_in_a_collective(_params: Any, watch: CallWatch) -> None:
        watch.progress(1, 2)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait()

    return wait_in_a_collective


def hang() -> None:
    """Never come back."""
    threading.Event().wait()


def generate(params: Any, watch: CallWatch) -> Any:
    """Answer a request as its prompt says: "hold" computes until cancelled, "meet" hangs."""
    if params["prompt"] == "hold":
        hold(params, watch)
    if params["prompt"] == "hang":
        hang()
    watch.progress(1, 1)
    return {"id": params["id"], "images_b64": [b"aW1hZ2U="] * params["n"], "seconds": 0.0}


def main(
    ctx: WorkerContext, config: dict[str, Any], rank: int, world_size: int, rendezvous: str
) -> None:
    """Answer calls with methods that misbehave in known ways."""
    if config["model"] == "raises" and rank == world_size - 1:
        raise RuntimeError("no such weights")
    if config["model"].startswith("/") and Path(config["model"]).exists():
        raise RuntimeError("the weights are gone")
    assert (rendezvous != "") == (world_size > 1)
    sock = socket.socket(fileno=ctx.fds["data"])
    methods = {
        "generate": generate,
        "rank": lambda params, _watch: [rank, params],
        "hold": hold,
        "brood": brood,
        "freeze": freeze,
        "lose": lose(rank),
        "paced": paced,
        "fails": fails(rank),
        "hold_gil": hold_gil,
        "lost_in_c": lost_in_c,
        "meet": meet(rank),
        "hang_up": lambda _params, _watch: sock.shutdown(socket.SHUT_RDWR),
    }
    loop = RankLoop(sock, methods, first=rank == 0, step_budget_s=config["step_budget_s"])
    ctx.on_stop(lambda _notice: loop.stop())
    if config["model"] == "slow":
        time.sleep(0.5)  # the loading
    ctx.ready(info=_infos())
    loop.serve()
    if not ctx.stopping.is_set() and config["model"] == "lingers":
        ctx.wait_stop()
