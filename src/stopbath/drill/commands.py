"""Commands for `stopbath run`: `python -m stopbath.drill.commands HABIT…`."""

from __future__ import annotations

import os
import signal
import sys
import threading

from stopbath.drill import habits

__all__ = ["main"]


def _cleanup_hangs() -> None:
    signal.signal(signal.SIGTERM, lambda *_: habits.for_ever())


def _takes_time() -> None:
    def finish(*_: object) -> None:
        threading.Event().wait(0.3)  # the work that was accepted
        habits.tell(who="finished")
        os._exit(0)

    signal.signal(signal.SIGTERM, finish)


def _exit_hangs() -> None:
    habits.lasting_thread()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def _counts() -> None:
    def heard(number: int, _: object) -> None:
        habits.tell(who="heard", number=number)
        os._exit(0)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, heard)


def _dispositions() -> None:
    with open("/proc/self/status", encoding="ascii") as file:  # noqa: PTH123
        facts = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    ours = 1 << 12 | 1 << 24  # SIGPIPE and SIGXFSZ, which Python itself ignores
    habits.tell(who="signals", ignored=int(facts["SigIgn"], 16) & ~ours, mask=facts["SigBlk"])


HABITS = {
    "obedient": lambda: None,
    "deaf": habits.deafen,
    "helper": habits.helper,
    "stray": habits.double_fork,
    "erased": lambda: habits.double_fork(erased=True),
    "storm": habits.fork_storm,
    "zombies": habits.zombies,
    "device": habits.device_memory,
    "simulated device": habits.simulated_memory,
    "listen": habits.listen,
    "hangs in its handler": _cleanup_hangs,
    "takes time": _takes_time,
    "exit hangs": _exit_hangs,
    "counts": _counts,
    "dispositions": _dispositions,
}


def main(args: list[str]) -> None:
    """Take on each habit, tell that the command is up, and go on for ever."""
    for word in args:
        name, _, value = word.partition("=")
        if name == "segment":
            habits.segment(value)
        elif name == "attach":
            habits.attach(value)
        else:
            HABITS[name]()
    habits.say("the command is up")
    habits.tell(who="up", pid=os.getpid())
    while True:  # a loop that lets Python's handlers run
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
