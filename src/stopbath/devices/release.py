"""Waiting for a device to be given back: bounded, and with the holder's name when it is not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

    from stopbath.devices.base import Claim, Ledger
    from stopbath.lifecycle import Deadline

__all__ = ["Release", "wait_released"]

_LOOK_EVERY_S = 0.005  # NVML tells of nothing by itself; the wait is bounded and rare


class Release(NamedTuple):
    """How a wait ended: after how long, and the claims that were left."""

    took_s: float
    left: tuple[Claim, ...]

    @property
    def done(self) -> bool:
        """Whether everything was given back."""
        return not self.left


def wait_released(ledger: Ledger, pids: Collection[int], by: Deadline) -> Release:
    """Wait until no process of `pids` has a claim any more, for dead and reaped ones.

    Memory that stays after the reap has another holder (a fork, an import through IPC): that
    one has a claim under its own pid, which `ledger.claims()` names.
    """
    began = time.monotonic()
    while True:
        left = tuple(claim for claim in ledger.claims() if claim.pid in pids)
        if not left or by.passed:
            return Release(time.monotonic() - began, left)
        time.sleep(min(_LOOK_EVERY_S, by.left_s()))
