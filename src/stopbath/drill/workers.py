"""Workers for the library face: each gets a list of habits and takes them on."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from stopbath.drill import habits
from stopbath.lifecycle import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopbath.lifecycle import WorkerContext

__all__ = ["main"]


def _before_ready(ctx: WorkerContext, name: str) -> None:
    """Take on what shows while the worker starts."""
    if name == "raises at start":
        habits.say("cannot open the checkpoint")
        raise FileNotFoundError("no such checkpoint")
    if name == "killed at start":
        habits.say("loading 3/10")
        signal.raise_signal(signal.SIGKILL)
    if name == "hangs at start":
        habits.tell(who="mute", pid=os.getpid())
        habits.for_ever()
    if name == "progress at start":
        for part in range(6):
            ctx.progress(f"loading {part + 1}/6")
            threading.Event().wait(0.25)  # the load itself
    if name == "progress for ever":
        habits.tell(who="mute", pid=os.getpid())
        while True:
            ctx.progress("loading for ever")
            threading.Event().wait(0.05)


SIMPLE: dict[str, Callable[[], object]] = {
    "deaf": habits.deafen,
    "helper": habits.helper,
    "stray": habits.double_fork,
    "erased": lambda: habits.double_fork(erased=True),
    "storm": habits.fork_storm,
    "zombies": habits.zombies,
    "device": habits.device_memory,
    "simulated device": habits.simulated_memory,
    "listen": habits.listen,
    "words": lambda: habits.say("CUDA error: an illegal memory access was encountered"),
    "hangs in its handler": lambda: signal.signal(signal.SIGTERM, lambda *_: habits.for_ever()),
    "thread": habits.lasting_thread,
}


def main(ctx: WorkerContext, *names: str) -> None:
    """Take on the habits, become ready, end when asked unless a habit forbids it."""
    for name in names:
        _before_ready(ctx, name)
        if name in SIMPLE:
            SIMPLE[name]()
    if "multiprocessing" in names:
        import multiprocessing

        context = multiprocessing.get_context("fork")
        child = context.Process(target=habits.for_ever)
        child.start()
        habits.tell(who="helper", pid=child.pid)
    ctx.ready({"pid": os.getpid()})
    _after_ready(ctx, names)


def _after_ready(ctx: WorkerContext, names: tuple[str, ...]) -> None:
    for name in names:
        if name in LASTING:
            LASTING[name]()
    if "closes its line" in names or "deaf" in names or "hangs in its handler" in names:
        habits.for_ever()
    while "floods" in names:
        ctx.progress("x" * 400)
    ctx.wait_stop()
    if "finishes" in names:
        threading.Event().wait(0.3)  # the work that was accepted
        habits.tell(who="finished")
    if "raises at stop" in names:
        habits.tell(who="raising", pid=os.getpid())
        raise RuntimeError("cannot flush")


def _until_it_polls(name: str) -> None:
    """Wait until a thread of this process sits in poll(2), as far as this kernel tells."""
    tid = next(it.native_id for it in threading.enumerate() if it.name == name)
    by = Deadline.after(1.0)
    while "poll" not in Path(f"/proc/self/task/{tid}/wchan").read_text() and not by.passed:
        time.sleep(0.001)  # only /proc shows it


def _close_line() -> None:
    # The control socket. Closed under a poll(2) it stays open for that, so nobody is told: the one
    # that listens hears nothing more, and the other end's next word is lost.
    _until_it_polls("stopbath-control")
    os.close(3)
    habits.tell(who="closed its line", pid=os.getpid())


def _in_c_for_a_while() -> None:
    habits.hold_interpreter(1.5)
    habits.tell(who="out of C")


LASTING: dict[str, Callable[[], object]] = {
    "closes its line": _close_line,
    "stops itself": habits.stop_self,
    "in C": habits.hold_interpreter,
    "in C for a while": _in_c_for_a_while,
    "floods": lambda: habits.tell(who="flooding"),
}
