"""The ranks of a replica find each other: device, threads, torch.distributed."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from stopbath.pipelines.base import ModelUnusable

__all__ = ["device_of", "join", "share_cores"]

_JOIN_S: Final = 120.0


def device_of(wanted: str, place: int, needed: int) -> str:
    """Give a rank's device: "cpu", or "cuda:<place>", its place among all ranks of all replicas.

    Raises:
        ModelUnusable: devices were asked for that this machine does not have.
    """
    if wanted == "cpu":
        return "cpu"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count >= needed:
        return f"cuda:{place}"
    if wanted == "cuda":
        raise ModelUnusable(f"--device cuda with {needed} ranks, but {count} CUDA devices")
    return "cpu"


def share_cores(ranks: int) -> int:
    """Give torch one rank's share of the cores it may run on, and say how many."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    torch.set_num_threads(threads)
    return threads


def join(store_fd: int, rank: int, world_size: int, device: str, stuck_s: float) -> None:
    """Join the replica's process group; `stuck_s` bounds every later collective.

    The meeting point is a memfd that all ranks inherit, opened again through /proc: a
    `file://` store without a file, so neither a path nor a port can be left behind. The group is
    never destroyed: that waits for peers that may be dead, and the kernel closes the sockets.

    Raises:
        RuntimeError: a peer did not come within two minutes.
    """
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    store = dist.FileStore(f"/proc/self/fd/{store_fd}", world_size)
    store.set_timeout(timedelta(seconds=_JOIN_S))
    dist.init_process_group(
        "nccl" if device.startswith("cuda") else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=stuck_s),
    )
