"""Who holds which device: NVML's ledger, and the holders that /proc shows.

`stopped` means that the memory is back too; this is where it is looked up. Above the lifecycle
layer, below everything that serves.
"""

from stopbath.devices.base import Claim, Device, Ledger, LedgerAbsent
from stopbath.devices.holders import Holder, holders
from stopbath.devices.nvml import open_ledger
from stopbath.devices.release import Release, wait_released

__all__ = [
    "Claim",
    "Device",
    "Holder",
    "Ledger",
    "LedgerAbsent",
    "Release",
    "holders",
    "open_ledger",
    "wait_released",
]
