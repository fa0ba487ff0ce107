"""How the keeper starts a process: own session, default handlers, only the listed descriptors."""

from __future__ import annotations

import errno
import os
import signal
import socket

from stopbath.lifecycle._process import ProcessRef, dup_high

TYPE_CHECKING = False  # as `typing` has it, which this process does without
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from stopbath.lifecycle._containment import Leaf, RunCgroup
    from stopbath.lifecycle._kept import Order

__all__ = ["Layout", "default_signals", "spawn_process", "spawn_zygote"]

_ZYGOTE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_zygote.py")
_ZYGOTE_FD = 3
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""A process with threads cannot be forked: those that libraries start while they are imported."""


class Layout:
    """Which descriptors a new process gets under which numbers. Owns what it makes itself.

    One that may ask for workers gets a socket to the keeper, whose other end is `access`.
    """

    __slots__ = ("_theirs", "access", "fds", "targets")

    def __init__(self, order: Order) -> None:
        self.fds = list(order.fds)
        self.targets = [int(target) for target in order.frame["fds"]]
        self.access: socket.socket | None = None
        self._theirs: socket.socket | None = None
        if order.frame["keeper_fd"] is not None:
            self.access, self._theirs = socket.socketpair()
            self.fds.append(self._theirs.fileno())
            self.targets.append(int(order.frame["keeper_fd"]))

    def handed_on(self) -> socket.socket | None:
        """The process is born: give our end of its socket, which the caller owns from here on."""
        access, self.access = self.access, None
        return access

    def close(self) -> None:
        """Close what is its own."""
        for sock in (self.access, self._theirs):
            if sock is not None:
                sock.close()


def spawn_process(
    order: Order, cgroup: RunCgroup, leaf: Leaf | None
) -> tuple[ProcessRef, socket.socket | None]:
    """Start what was asked for as a new program.

    Gives the process, and our end of a socket when it may ask for workers itself; the caller
    owns both. `OSError` when it cannot be started.
    """
    frame = order.frame
    if not frame["argv"][0]:  # no program has that name; posix_spawn takes it for a mistake
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    argv = [*map(str, frame["argv"]), *([str(os.getpid())] if frame["worker"] else [])]
    layout = Layout(order)
    own: list[int] = []
    try:
        above = max(layout.targets, default=2)
        own.extend(dup_high(fd, above) for fd in layout.fds)
        actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
            (os.POSIX_SPAWN_DUP2, source, target)
            for source, target in zip(own, layout.targets, strict=True)
        ]
        if frame["worker"]:
            actions.insert(0, (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0))
        with cgroup.born_in(None if frame["worker"] else leaf):
            pid = _exec(
                argv,
                order.env,
                file_actions=actions,
                **({"setsid": True} if frame["new_session"] else {"setpgroup": 0}),
                setsigmask=(),
                setsigdef=default_signals(frame["ignore"]),
            )
        # A child keeps its pid until we reap it: the pidfd cannot miss it.
        return ProcessRef.open(pid), layout.handed_on()
    finally:
        for fd in own:
            os.close(fd)
        layout.close()


def spawn_zygote(interpreter: str, env: Mapping[str, str]) -> tuple[ProcessRef, socket.socket]:
    """Start a zygote, which waits to be told what to import; the caller owns both."""
    ours, theirs = socket.socketpair()
    source = -1
    try:
        source = dup_high(theirs.fileno(), _ZYGOTE_FD)
        argv = [interpreter, "-I", "-S", _ZYGOTE, str(_ZYGOTE_FD), str(os.getpid())]
        pid = os.posix_spawn(
            interpreter,
            argv,
            {**env, **_ONE_THREAD},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, source, _ZYGOTE_FD),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=default_signals(),
        )
        return ProcessRef.open(pid), ours
    except OSError:
        ours.close()  # at whose end it leaves
        raise
    finally:
        theirs.close()
        if source >= 0:
            os.close(source)


def _exec(argv: list[str], env: Mapping[str, str], **how: Any) -> int:
    """Start a program as execvp(3) would: a script that names no interpreter is the shell's."""
    try:
        return os.posix_spawnp(argv[0], argv, env, **how)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
    folders = [""] if "/" in argv[0] else os.get_exec_path(env)
    paths = (os.path.join(folder, argv[0]) for folder in folders)
    script = next((path for path in paths if os.access(path, os.X_OK)), argv[0])
    return os.posix_spawn("/bin/sh", ["/bin/sh", script, *argv[1:]], env, **how)


def default_signals(ignored: Sequence[int] = ()) -> list[int]:
    """Every signal that a new process gets back at its default; what nohup ignored stays so."""
    keep = {signal.SIGKILL, signal.SIGSTOP, *ignored}
    return [
        number for number in range(1, signal.NSIG) if number not in keep and number not in (32, 33)
    ]
