"""The ranks of a replica: what each is told, the descriptors it inherits, and how it is."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Final

import msgspec

from stopbath.config import environment
from stopbath.executor._preload import preload_of
from stopbath.executor.base import RankStatus, ReplicaStatus
from stopbath.lifecycle import GroupState, WorkerSpec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack

    from stopbath.config import ServeConfig
    from stopbath.executor._threads import ThreadGroup, ThreadWorker
    from stopbath.lifecycle import Cause, WorkerGroup, WorkerView

__all__ = ["TARGET", "describe", "status_of"]

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
    # To ask whether there is a GPU without becoming a process that cannot be forked any more.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


def describe(
    config: ServeConfig, replica: str, target: str, ours: ExitStack, theirs: ExitStack
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
    preload = preload_of(config) if config.zygote else ()
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
                name=f"{replica}/rank{rank}",
                env=env,
                fds={"data": its.fileno(), **shared},
                preload=preload,
            )
        )
    return socks, specs


def status_of(
    name: str,
    group: WorkerGroup | ThreadGroup | None,
    cause: Cause | None,
    heard_s: Sequence[float | None],
) -> ReplicaStatus:
    """Say how a replica is. `heard_s` holds when each rank last said something, by rank."""
    if group is None:
        return ReplicaStatus(name, GroupState.NEW, cause, ())
    ranks = tuple(_rank_status(view, heard_s[view.rank]) for view in group.workers)
    return ReplicaStatus(name, group.state, cause or group.cause, ranks)


def _rank_status(view: WorkerView | ThreadWorker, heard: float | None) -> RankStatus:
    said_s = view.last_progress_s
    if heard is not None:
        answered_s = time.monotonic() - heard
        said_s = answered_s if said_s is None else min(said_s, answered_s)
    return RankStatus(view.name, view.rank, view.pid, view.state, said_s)
