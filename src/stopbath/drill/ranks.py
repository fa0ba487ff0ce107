"""The server of the serve face: the real one, over ranks without a model.

Guardian, keeper, HTTP server, engine, executor and data channels are those of `stopbath serve`;
only the ranks' model is played, so that a rank starts in milliseconds and torch is not needed.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from stopbath.drill import habits
from stopbath.messages import GENERATE, PING, GenerationRequest, GenerationResult, ModelInfo
from stopbath.worker.loop import CallWatch, RankLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopbath.lifecycle import WorkerContext

__all__ = ["rank", "server"]

STEP_S = 0.01
_PIXEL = (
    b"iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    b"+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
_INFO = ModelInfo(
    pipeline="Drill",
    family="drill",
    width=8,
    height=8,
    size_multiple=8,
    max_width=1024,
    max_height=1024,
    num_inference_steps=4,
    guidance_scale=1.0,
    max_prompt_tokens=77,
    device="cpu",
)


class Cancelled(Exception):
    """A call was given up; the name is what the server reads."""


def server(ctx: Any, config: dict[str, Any]) -> None:
    """Serve as `stopbath.server.main` does, with ranks of this module."""
    from stopbath.server import main

    raise SystemExit(main.run(ctx, config, main.multiproc("stopbath.drill.ranks:rank")))


def _generate(number: int) -> Any:
    def generate(params: Any, watch: CallWatch) -> dict[str, Any] | None:
        request = msgspec.convert(params, GenerationRequest)
        habits.tell(who="generating", rank=number, prompt=request.prompt)
        if request.prompt == "block" and number == 0:
            habits.for_ever()  # in a collective whose peer is gone
        if request.prompt == "in C":
            habits.hold_interpreter()
        if request.prompt == "in C for a while":
            habits.hold_interpreter(1.5)
        for step in range(request.num_inference_steps):
            if watch.cancelled:
                habits.tell(who="cancelled", prompt=request.prompt)
                raise Cancelled("given up")
            threading.Event().wait(STEP_S)  # the step itself
            watch.progress(step + 1, request.num_inference_steps)
        if number:
            return None
        result = GenerationResult(id=request.id, images_b64=[_PIXEL] * request.n, seconds=0.0)
        return msgspec.structs.asdict(result)

    return generate


SIMPLE: dict[str, Callable[[], object]] = {
    "deaf": habits.deafen,
    "helper": habits.helper,
    "stray": habits.double_fork,
    "erased": lambda: habits.double_fork(erased=True),
    "storm": habits.fork_storm,
    "zombies": habits.zombies,
    "device": habits.device_memory,
    "simulated device": habits.simulated_memory,
    "words": lambda: habits.say("CUDA error: an illegal memory access was encountered"),
    "thread": habits.lasting_thread,
    "hangs in its handler": lambda: signal.signal(signal.SIGTERM, lambda *_: habits.for_ever()),
}


def _before_ready(name: str) -> None:
    if name in SIMPLE:
        SIMPLE[name]()
    elif name == "raises at start":
        habits.say("cannot open the checkpoint")
        habits.tell(who="raising", pid=os.getpid())
        raise FileNotFoundError("no such checkpoint")
    elif name == "hangs at start":
        habits.tell(who="mute", pid=os.getpid())
        habits.for_ever()


def rank(
    ctx: WorkerContext, config: dict[str, Any], number: int, _world: int, _rendezvous: str
) -> None:
    """Answer calls as a rank does; `worker_extension` of the config lists its habits."""
    names = config["worker_extension"].split(",")
    for name in names:
        _before_ready(name)
    methods = {GENERATE: _generate(number), PING: lambda params, _watch: params}
    loop = RankLoop(
        socket.socket(fileno=ctx.fds["data"]),
        methods,
        first=number == 0,
        step_budget_s=config["step_budget_s"],
    )
    if "deaf" not in names:
        ctx.on_stop(lambda _notice: loop.stop())
    if "dispositions" in names:
        with open("/proc/self/status", encoding="ascii") as file:  # noqa: PTH123
            facts = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        habits.tell(who="signals", ignored=int(facts["SigIgn"], 16), mask=facts["SigBlk"])
    ctx.ready(info=msgspec.to_builtins(_INFO))
    loop.serve()
