"""What a guardian is told of device memory: who holds some at the start, what is left at the end.

It asks a command that it was given, a process of its own each time: this layer knows no driver,
a driver can hang, and nothing of it may stay in the guardian's memory. Nothing here delays the
start of what is run, and everything is bounded.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from typing import TYPE_CHECKING, Any

from stopbath.lifecycle._birth import default_signals
from stopbath.lifecycle._process import ProcessRef, reap
from stopbath.lifecycle._words import forward

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from stopbath.lifecycle._supervisor import Supervisor

__all__ = ["DeviceLedger", "render_devices"]

_RELEASE_S = 2.0  # memory is back some milliseconds after the reap, unless another holds it
_ANSWER_S = 3.0  # for an interpreter to start and a driver to answer
_MOST_NAMED = 4


class _Look:
    """One helper process, and what it has said."""

    def __init__(self, argv: Sequence[str], asked: dict[str, Any]) -> None:
        self.said = b""
        data = os.memfd_create("stopbath-look")
        self.fd, write_end = os.pipe()
        os.set_blocking(self.fd, False)
        try:
            os.write(data, json.dumps(asked).encode())
            os.lseek(data, 0, os.SEEK_SET)
            pid = os.posix_spawn(
                argv[0],
                list(argv),
                os.environ,  # noqa: TID251  (passed on, not read)
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, data, 0),
                    (os.POSIX_SPAWN_DUP2, write_end, 1),
                    (os.POSIX_SPAWN_DUP2, write_end, 2),
                ],
                setsid=True,
                setsigmask=(),
                setsigdef=default_signals(),
            )
            self._ref = ProcessRef.open(pid)  # unreaped, it is no other's
        except OSError:
            os.close(self.fd)
            raise
        finally:
            os.close(data)
            os.close(write_end)

    def read(self) -> bool:
        """Take what it has said; True when that was all."""
        try:
            while chunk := os.read(self.fd, 65536):
                self.said += chunk
        except BlockingIOError:
            return False
        return True

    def answer(self) -> dict[str, Any]:
        """Give its answer, the last line that is one: a driver's module may warn of something.

        Where there is none, its last words, of a traceback as a rule, say why.
        """
        lines = self.said.decode("utf-8", "replace").splitlines()
        for line in reversed(lines):
            if line.startswith("{"):
                with contextlib.suppress(ValueError):
                    found: dict[str, Any] = json.loads(line)
                    return found
        return {"absent": lines[-1] if lines else "the look at the devices gave no answer"}

    def end(self) -> None:
        """End it: it has answered, or is too late."""
        self._ref.send(signal.SIGKILL)
        if self._ref.dead(wait_s=0.5):
            reap(self._ref)
        self._ref.close()
        os.close(self.fd)


class DeviceLedger:
    """The two looks of a run. Everything here is called on the guardian's thread."""

    def __init__(self, argv: Sequence[str], sup: Supervisor) -> None:
        self._argv, self._sup = argv, sup
        self._first: _Look | None = None
        self._before: dict[str, Any] = {"absent": "it ended before the devices were looked at"}

    def begin(self) -> None:
        """Look at what is there; what is run has been asked for already."""
        self._first = self._look({"guardian": os.getpid()})
        if self._first is not None:
            self._sup.watch_fd(self._first.fd, self._hear)

    def _look(self, asked: dict[str, Any]) -> _Look | None:
        try:
            return _Look(self._argv, asked)
        except OSError as error:
            self._before = {"absent": f"the devices cannot be looked at: {error.strerror}"}
            return None

    def _hear(self) -> None:
        if self._first is None or not self._first.read():
            return
        self._sup.unwatch_fd(self._first.fd)
        self._before = self._first.answer()
        self._first.end()
        self._first = None
        forward("".join(f"stopbath: {line}\n" for line in self._in_the_way()).encode())

    def _in_the_way(self) -> list[str]:
        """Name who holds memory before we do: what is run may find none left."""
        devices = self._before.get("devices", ())
        sizes = {it["number"]: it["total_bytes"] for it in devices if it["visible"]}
        lines = [
            f"device {it['device']}: pid {it['pid']} ({it['command'] or 'not to be seen here'}) "
            f"holds {_size(it['used_bytes'])} of {_size(sizes[it['device']])}"
            for it in self._before.get("foreign", ())
            if it["device"] in sizes
        ]
        if len(lines) > _MOST_NAMED:
            lines[_MOST_NAMED:] = [f"… and {len(lines) - _MOST_NAMED} more hold device memory"]
        return lines

    def cut(self) -> None:
        """Everything has ended: a look at the start that still goes on is of no use."""
        if self._first is not None:
            self._first.end()
            self._first = None

    def settle(
        self, ours: Collection[int], hurry_fd: int, hurried: Callable[[], bool]
    ) -> tuple[list[dict[str, Any]], str]:
        """Wait until the memory is back, for a bounded time, or until somebody is in a hurry.

        Gives the report's `devices`, and why there are none.
        """
        look = None
        if "absent" not in self._before:
            asked = {"before": self._before, "ours": list(ours), "within_s": _RELEASE_S}
            look = self._look(asked | {"guardian": os.getpid()})
        if look is None:
            return [], self._before["absent"]
        until = time.monotonic() + _RELEASE_S + _ANSWER_S
        poll = select.poll()
        poll.register(look.fd, select.POLLIN)
        poll.register(hurry_fd, select.POLLIN)
        done = in_a_hurry = False
        while not (done or in_a_hurry) and time.monotonic() < until:
            ready = {fd for fd, _ in poll.poll(max(0.0, until - time.monotonic()) * 1000)}
            in_a_hurry = hurry_fd in ready and hurried()
            done = look.fd in ready and look.read()
        found: dict[str, Any] = (
            look.answer() if done else {"absent": "the driver did not answer in time"}
        )
        if in_a_hurry and not done:
            found = {"absent": "a further signal ended the wait for the devices"}
        look.end()
        return found.get("devices", []), found.get("absent", "")


def render_devices(devices: Sequence[dict[str, Any]]) -> list[str]:
    """Say in plain lines what was not given back."""
    return [
        f"device {device['number']}: {_size(it['used_bytes'])} not given back in "
        f"{device['waited_s']:.1f} s: " + (f"pid {it['pid']}, " if it["pid"] else "") + it["why"]
        for device in devices
        for it in device["left"]
    ]


def _size(used: int | None) -> str:
    return "memory of unknown size" if used is None else f"{used / 2**30:.1f} GiB"
