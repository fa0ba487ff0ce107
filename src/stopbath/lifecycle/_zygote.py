"""A zygote: imports once what many workers need, and forks them: `_zygote.py FD KEEPER_PID`.

Run by path with `python -I -S` by the keeper, which is its parent and asks for every fork
(`_nursery`). It has one thread, for ever: a fork copies the thread that calls it and the locks of
all others (fork(2)). It is no subreaper: a worker is forked twice, comes up to the keeper when
the process in between has ended, and only then arms its parent-death signal, which is lost in a
fork. So the zygote's own end is nothing to the workers.

keeper → zygote: `preload` (what to import, and where), `fork` (one worker)
zygote → keeper: `ready` or `unfit`, `forked` (its pid) or `failed`
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys

if __name__ == "__main__":  # run by path, without site: let the package be found beside it
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from stopbath.lifecycle import _child
from stopbath.lifecycle._channel import MAX_FDS, Channel, Frame
from stopbath.lifecycle._process import dup_high

__all__ = ["main"]

_RESERVED = 16 + MAX_FDS
"""Below this are the numbers that workers know their descriptors by. What a module opens while it
is imported gets others, and is left as it is."""

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/davinci", "/dev/habanalabs")
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class _Unfit(Exception):
    """It cannot be forked; says why."""


def main(argv: list[str]) -> list[str] | None:
    """Serve the keeper until it is gone; in a worker, give the words for `_child`."""
    control, keeper_pid = int(argv[0]), int(argv[1])
    _child.protect(keeper_pid, by_kernel=sys.platform == "linux")
    _child.keep_only({control})
    channel = Channel(socket.socket(fileno=_reserve(control)))
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    while True:
        poll.poll()  # bounded by the other side: it asks, or its end is an event here
        for frame, fds in channel.receive():
            if frame["op"] == "preload":
                answer = _preload(frame)
            else:
                pid = _fork(channel, frame, fds)
                if pid == 0:
                    return list(frame["words"])
                answer = {"ev": "forked", "pid": pid} if pid > 0 else {"ev": "failed"}
            try:
                channel.send(answer)  # some bytes, to a keeper that has read all the others
            except BrokenPipeError:
                return None
        if channel.eof:
            return None


def _reserve(control: int) -> int:
    """Take all the numbers that workers will use; gives the control socket's new one."""
    moved = dup_high(control, _RESERVED)
    for number in range(3, _RESERVED):
        os.dup2(0, number, inheritable=False)
    return moved


def _preload(frame: Frame) -> Frame:
    """Import, and look whether this process can still be forked."""
    from stopbath.lifecycle._handshake import find, settle

    try:
        settle(frame, with_site=True)
        for word in frame["preload"]:
            find(word)
        _check()
    except _Unfit as why:
        return {"ev": "unfit", "why": str(why)}
    except BaseException as error:  # whatever it is, the worker that needs the module will say it
        return {"ev": "unfit", "why": f"could not import: {type(error).__name__}: {error}"[:500]}
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, closed, full
            stream.flush()  # or every worker would
    gc.collect()
    gc.freeze()  # a collection in a worker would touch, and so copy, every page of what is here
    return {"ev": "ready"}


def _check() -> None:
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise _Unfit(f"has {threads} threads after its imports")
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own is closed again
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(_DEVICES):
                raise _Unfit(f"has opened {target} while it was importing")


def _fork(channel: Channel, frame: Frame, fds: list[int]) -> int:
    """Fork a worker up to the keeper: its pid in the zygote, -1 if it failed, 0 in the worker."""
    told_in, told = os.pipe()
    between = _fork_once()
    if between == 0:
        worker = _fork_once()
        if worker != 0:  # never leaves this block
            os.write(told, b"%d" % worker)
            os._exit(0)
        os.close(told_in)
        os.close(told)
        channel.close()
        _become(frame, fds)
        return 0
    os.close(told)
    for fd in fds:
        os.close(fd)
    if between > 0:
        os.waitpid(between, 0)  # it forks and ends; from then on the worker is the keeper's
    word = os.read(told_in, 32)
    os.close(told_in)
    return int(word or b"-1")


def _fork_once() -> int:
    try:
        return os.fork()
    except OSError:  # no process, or no memory, to be had
        return -1


def _become(frame: Frame, fds: list[int]) -> None:
    """Wait to be taken hold of, then be as a new process is: session, descriptors, signals."""
    gate, *given = fds
    if os.read(gate, 1) != b"g":  # nobody waits for us any more
        os._exit(1)
    os.setsid()
    for fd, target in zip(given, frame["targets"], strict=True):
        os.dup2(fd, target, inheritable=target <= 2)  # noqa: PLR2004  (stderr)
    for number in {*range(3, _RESERVED), gate, *given} - set(frame["targets"]):
        os.close(number)
    os.environ.clear()  # noqa: TID251  (a worker gets one of its own)
    os.environ.update(frame["env"])  # noqa: TID251
    _reset_signals()


def _reset_signals() -> None:
    """Take back what the imports may have installed."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) is not None:  # None: C code's, and Python cannot know
            how = signal.SIG_IGN if number in _IGNORED_BY_PYTHON else signal.SIG_DFL
            signal.signal(number, how)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


if __name__ == "__main__":
    words = main(sys.argv[1:])
    if words is not None:
        _child.be(words, forked=True)
