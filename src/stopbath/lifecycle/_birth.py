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

    from stopbath.lifecycle._channel import Frame
    from stopbath.lifecycle._containment import Leaf, RunCgroup

__all__ = ["default_signals", "spawn_process"]


def spawn_process(
    frame: Frame, fds: list[int], env: Mapping[str, str], cgroup: RunCgroup, leaf: Leaf | None
) -> tuple[ProcessRef, socket.socket | None]:
    """Start what `frame` describes, with `fds` under the numbers it names.

    Gives the process, and our end of a socket when it may ask for workers itself; the caller
    owns both. `OSError` when it cannot be started.
    """
    targets = [int(target) for target in frame["fds"]]
    if not frame["argv"][0]:  # no program has that name; posix_spawn takes it for a mistake
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    argv = [*map(str, frame["argv"]), *([str(os.getpid())] if frame["worker"] else [])]
    pair: tuple[socket.socket, socket.socket] | None = None
    own: list[int] = []
    try:
        if frame["keeper_fd"] is not None:
            pair = socket.socketpair()
            fds = [pair[1].fileno(), *fds]
            targets = [int(frame["keeper_fd"]), *targets]
        above = max(targets, default=2)
        own.extend(dup_high(fd, above) for fd in fds)
        actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
            (os.POSIX_SPAWN_DUP2, source, target)
            for source, target in zip(own, targets, strict=True)
        ]
        if frame["worker"]:
            actions.insert(0, (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0))
        with cgroup.born_in(None if frame["worker"] else leaf):
            pid = _exec(
                argv,
                env,
                file_actions=actions,
                **({"setsid": True} if frame["new_session"] else {"setpgroup": 0}),
                setsigmask=(),
                setsigdef=default_signals(frame["ignore"]),
            )
        # A child keeps its pid until we reap it: the pidfd cannot miss it.
        return ProcessRef.open(pid), None if pair is None else pair[0]
    except OSError:
        if pair is not None:
            pair[0].close()
        raise
    finally:
        for fd in own:
            os.close(fd)
        if pair is not None:
            pair[1].close()


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
