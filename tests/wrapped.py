"""`stopbath run` as tests use it: started, on a terminal or not, looked at, ended."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from observing import alive, wait_until
from stopbath.lifecycle import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["STOPBATH", "Holdings", "Wrapped", "free_port", "wrapping"]

STOPBATH = Path(sys.executable).with_name("stopbath")


class Wrapped:
    """One run: the guardian's process, what it printed, its report."""

    def __init__(self, command: Sequence[str], folder: Path, *options: str, **how: Any) -> None:
        self.folder = folder
        self.out, self.err, self._report = folder / "out", folder / "err", folder / "report.json"
        self._master = self._slave = -1
        before: tuple[str, ...] = how.pop("before", ())
        if how.pop("terminal", False):
            self._master, self._slave = pty.openpty()
            before = ("setsid", "--ctty", *before)
            how["stdin"] = self._slave
        how.setdefault("stdin", subprocess.DEVNULL)
        for name, path in (("stdout", self.out), ("stderr", self.err)):
            if name not in how:
                how[name] = path.open("wb")
        argv = [*before, str(STOPBATH), "run", "--report", str(self._report), *options]
        env = {**os.environ, **how.pop("env", {}), "TMPDIR": str(folder), "XDG_RUNTIME_DIR": ""}
        self.process = subprocess.Popen([*argv, "--", *command], env=env, **how)
        for name in ("stdout", "stderr"):
            if hasattr(how[name], "close"):
                how[name].close()

    # -- who is who

    @property
    def guardian(self) -> int:
        """The pid of what was started: console script, then guardian, always the same process."""
        return self.process.pid

    @property
    def keeper(self) -> int:
        """The guardian's only child."""
        return self._child_of(self.guardian)

    @property
    def command(self) -> int:
        """The command's main process."""
        return self._child_of(self.keeper)

    def _child_of(self, pid: int) -> int:
        found: list[int] = []

        def look() -> bool:
            with contextlib.suppress(OSError):
                path = Path(f"/proc/{pid}/task/{pid}/children")
                found[:] = [int(word) for word in path.read_text().split()]
            return bool(found)

        wait_until(look, Deadline.after(10), f"{pid} has a child")
        return found[0]

    def recorded(self, path: str | Path) -> bool:
        """Whether the run has proved something to be its own."""
        files = self.folder.glob("stopbath-*/*.run")
        return any(f'"path": "{path}"' in file.read_text() for file in files)

    # -- what happens to it

    def says(self, word: str, by_s: float = 20, where: Path | None = None) -> None:
        """Wait until the command has printed a word."""
        path = where or self.out

        def said() -> bool:
            return word in path.read_text(errors="replace")

        by = Deadline.after(by_s)
        wait_until(lambda: said() or self.process.poll() is not None, by, f"it says {word!r}")
        assert said(), self.err.read_text(errors="replace") + self.out.read_text(errors="replace")

    def ctrl_c(self) -> None:
        """Type it, on its terminal."""
        os.write(self._master, b"\x03")

    def type(self, text: bytes) -> None:
        """Type something else."""
        os.write(self._master, text)

    def send(self, number: int) -> None:
        """Signal the guardian."""
        self.process.send_signal(number)

    def ended(self, by_s: float = 10) -> int:
        """Give the exit code: n when it left with n, -n when a signal ended it."""
        return self.process.wait(by_s)

    @property
    def report(self) -> dict[str, Any]:
        """What it accounted for."""
        found: dict[str, Any] = json.loads(self._report.read_text())
        return found

    @property
    def errors(self) -> str:
        """What is on stderr."""
        return self.err.read_text(errors="replace")

    def close(self) -> None:
        """End it, whatever state it is in."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for fd in (self._master, self._slave):
            if fd >= 0:
                os.close(fd)
        self._master = self._slave = -1


def wrapping(folder: Path) -> Iterator[Callable[..., Wrapped]]:
    """Make runs; ends those a test left."""
    made: list[Wrapped] = []

    def start(*command: str, options: Sequence[str] = (), **how: Any) -> Wrapped:
        own = folder / f"run{len(made)}"
        own.mkdir()
        made.append(Wrapped(command, own, *options, **how))
        return made[-1]

    yield start
    for one in made:
        one.close()


class Holdings(NamedTuple):
    """What a tree has while it lives, and what must be gone when it does not."""

    pids: frozenset[int]
    ports: frozenset[int]
    sockets: frozenset[str]
    shared_memory: frozenset[str]

    @classmethod
    def of(cls, run: Wrapped) -> Holdings:
        """Look at guardian, keeper and everything below."""
        pids = {run.guardian}
        parents = _parents()
        while more := {pid for pid, parent in parents.items() if parent in pids} - pids:
            pids |= more
        inodes, shm = set(), set()
        for pid in pids:
            with contextlib.suppress(OSError):
                for fd in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        target = str(fd.readlink())
                        if target.startswith("socket:["):
                            inodes.add(target[8:-1])
                        elif target.startswith("/dev/shm/") and "(deleted)" not in target:
                            shm.add(target)
        ports = {int(it[1].rpartition(":")[2], 16) for it in _listening() if it[9] in inodes}
        table = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
        sockets = {it[7] for it in table if len(it) > 7 and it[6] in inodes and it[7][0] == "/"}
        return cls(frozenset(pids), frozenset(ports), frozenset(sockets), frozenset(shm))

    def left(self) -> dict[str, list[Any]]:
        """Name what is still there."""
        listening = {int(it[1].rpartition(":")[2], 16) for it in _listening()}
        found = {
            "processes": [_title(pid) for pid in self.pids if alive(pid)],
            "ports": sorted(self.ports & listening),
            "sockets": [path for path in self.sockets if os.path.lexists(path)],
            "shared memory": [path for path in self.shared_memory if os.path.lexists(path)],
        }
        return {name: items for name, items in found.items() if items}

    def are_gone(self, by_s: float) -> None:
        """Nothing is left at the bound."""
        by = Deadline.after(by_s)
        wait_until(lambda: not self.left() or by.left_s() < 0.1, Deadline.after(by_s + 1))
        left = self.left()
        assert not left, left


def _title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"{pid} " + Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return str(pid)


def _parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                found[int(entry.name)] = int(stat[1])
    return found


def _listening() -> list[list[str]]:
    lines: list[str] = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            lines += Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    return [it for it in map(str.split, lines) if it[3] == "0A"]


def free_port() -> int:
    """Give a port nobody listens on now."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
