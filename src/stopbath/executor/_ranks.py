"""How the ranks of a replica are started: what each is told, and the descriptors it inherits."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Final

import msgspec

from stopbath.config import environment
from stopbath.lifecycle import WorkerSpec

if TYPE_CHECKING:
    from contextlib import ExitStack

    from stopbath.config import ServeConfig

__all__ = ["TARGET", "describe"]

TARGET: Final = "stopbath.worker.main:main"
"""What a rank runs; by name, because this side imports nothing of a rank."""

_STORE: Final = "store"
_SETTINGS: Final = {
    # The ranks of a replica share a machine: their sockets need no other interface, and the name
    # of the host need not resolve.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # OpenMP's threads spin while they wait for each other. When anything else wants a core, they
    # spin away the time of the one they wait for: a step took 20 times as long on a busy machine.
    "OMP_WAIT_POLICY": "PASSIVE",
}


def describe(
    config: ServeConfig, target: str, ours: ExitStack, theirs: ExitStack
) -> tuple[list[socket.socket], list[WorkerSpec]]:
    """Give our end of every rank's data channel and every rank's spec, in rank order.

    Our ends are owned by `ours`; what the ranks inherit is owned by `theirs` and is to be closed
    once they have been started.
    """
    told = msgspec.to_builtins(config)
    given = environment()
    env = {key: value for key, value in _SETTINGS.items() if key not in given}
    shared: dict[str, int] = {}
    if config.ranks > 1:
        store = os.memfd_create("stopbath-store", os.MFD_CLOEXEC)
        theirs.callback(os.close, store)
        shared[_STORE] = store
    socks, specs = [], []
    for rank in range(config.ranks):
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.callback(mine.close)
        theirs.callback(its.close)
        socks.append(mine)
        specs.append(
            WorkerSpec(
                target,
                args=(told, rank, config.ranks, _STORE if shared else ""),
                name=f"rank{rank}",
                env=env,
                fds={"data": its.fileno(), **shared},
            )
        )
    return socks, specs
