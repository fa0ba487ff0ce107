"""What a ledger of device memory is, whoever keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from stopbath.lifecycle import LifecycleError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Claim", "Device", "Ledger", "LedgerAbsent"]


class Device(NamedTuple):
    """One accelerator as its driver counts it. Memory in bytes, all processes together."""

    number: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int


class Claim(NamedTuple):
    """A process's hold on a device.

    `used_bytes` is None where the driver does not tell (MIG, some containers); the claim stands
    all the same. The pid is the driver's: inside a container it may be of another PID namespace.
    """

    device: int
    pid: int
    used_bytes: int | None


class LedgerAbsent(LifecycleError):
    """There is no ledger to read here, and why: said, and no error for whoever asks."""


class Ledger(Protocol):
    """Reads who holds what. Per process: a device's total says nothing on a shared card."""

    driver: str

    def devices(self) -> Sequence[Device]:
        """Give the devices; `LedgerAbsent` when the driver has gone away meanwhile."""
        ...

    def claims(self) -> Sequence[Claim]:
        """Give one claim per process and device; `LedgerAbsent` as above."""
        ...

    def close(self) -> None:
        """Let go of the driver."""
        ...
