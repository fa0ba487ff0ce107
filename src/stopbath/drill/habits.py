"""What makes a process misbehave; shared by the workers, commands and ranks of the scenarios.

Standard library only: a command pays for nothing else.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "DEVICE_BYTES",
    "TOLD",
    "attach",
    "deafen",
    "device_memory",
    "double_fork",
    "for_ever",
    "fork_storm",
    "helper",
    "hold_interpreter",
    "lasting_thread",
    "listen",
    "read_told",
    "say",
    "segment",
    "simulated_memory",
    "stop_self",
    "tell",
    "zombies",
]

TOLD = "STOPBATH_DRILL_TOLD"
DEVICE_BYTES = 1 << 29  # what a process takes of a device, real or simulated
_SHM = "/dev/shm"  # noqa: S108  (where POSIX shared memory is)
_DEAF_TO = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def tell(**facts: object) -> None:
    """Add a line of JSON to what the scenario's processes tell the drill."""
    path = os.environ.get(TOLD)  # noqa: TID251  (the drill's own line to what it has started)
    if path:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        os.write(fd, json.dumps(facts).encode() + b"\n")
        os.close(fd)


def read_told(path: Path) -> list[dict[str, Any]]:
    """Read what was told, in order; a line that is just being written is left for the next time."""
    facts = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            facts.append(json.loads(line))
    return facts


def say(line: str) -> None:
    """Write a line on stderr, whole and at once; nobody may be reading."""
    with suppress(OSError):
        os.write(2, line.encode() + b"\n")


def for_ever() -> NoReturn:
    """Do nothing, for ever."""
    while True:
        signal.pause()


def deafen() -> None:
    """Ignore what asks politely."""
    for number in _DEAF_TO:
        signal.signal(number, signal.SIG_IGN)


def helper() -> None:
    """Fork a plain child that holds every descriptor of this process."""
    pid = os.fork()
    if pid == 0:
        for_ever()
    tell(who="helper", pid=pid)


def double_fork(*, erased: bool = False) -> None:
    """Leave a deaf process that neither parent, group nor session leads to."""
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.setsid()
    deafen()
    tell(who="stray", pid=os.getpid())
    if erased:
        os.execve("/bin/sleep", ["sleep", "600"], {})  # noqa: S606  (no environment to be found by)
    for_ever()


def fork_storm() -> None:
    """Have descendants that hop from session to session for as long as they live."""
    for _ in range(2):
        if os.fork() == 0:
            while True:
                os.setsid()
                if os.fork():
                    os._exit(0)
    tell(who="storm")


def zombies() -> None:
    """Leave orphans that end by themselves, for somebody else to reap."""
    for _ in range(5):
        first = os.fork()
        if first == 0:
            if os.fork() == 0:
                os.setsid()
                tell(who="zombie", pid=os.getpid())
            os._exit(0)
        os.waitpid(first, 0)


def hold_interpreter(seconds: float | None = None) -> None:
    """Sit in a C function that never gives the interpreter back; for ever without `seconds`."""
    libc = ctypes.PyDLL(None)  # PyDLL keeps the GIL
    tell(who="in C")
    if seconds is not None:
        libc.usleep(ctypes.c_uint(int(seconds * 1e6)))
        return
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def lasting_thread() -> None:
    """Have a thread that no exit of the interpreter gets past."""
    threading.Thread(target=threading.Event().wait, daemon=False).start()
    tell(who="thread")


def listen() -> None:
    """Listen on a port that a forked child inherits, and on a socket file."""
    port = socket.create_server(("127.0.0.1", 0))
    os.set_inheritable(port.fileno(), True)
    pid = os.fork()
    if pid == 0:
        for_ever()
    tell(who="port", port=port.getsockname()[1])
    port.detach()


def segment(name: str) -> None:
    """Make and map a segment of shared memory, as C programs do."""
    from mmap import mmap

    fd = os.open(f"{_SHM}/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(fd, 4096)
    mapped = mmap(fd, 4096)
    mapped[0] = 1
    tell(who="segment", name=name)
    _kept.append(mapped)


_kept: list[object] = []


def attach(name: str) -> None:
    """Map a segment that somebody else has made."""
    from mmap import mmap

    fd = os.open(f"{_SHM}/{name}", os.O_RDWR)
    _kept.append(mmap(fd, os.fstat(fd).st_size))
    tell(who="attached", name=name)


def device_memory() -> None:
    """Hold half a gigabyte of a device."""
    torch = importlib.import_module("torch")  # by name: nothing of the command line imports it

    _kept.append(torch.zeros(DEVICE_BYTES, dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()


def simulated_memory() -> None:
    """Hold half a gigabyte of the simulated device, for as long as this process lives."""
    from stopbath.lifecycle._process import own_start

    tell(who="device", pid=os.getpid(), start=own_start(), bytes=DEVICE_BYTES)


def stop_self() -> None:
    """Stop this process as a debugger would."""
    signal.raise_signal(signal.SIGSTOP)
