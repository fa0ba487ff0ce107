"""Holders of device files, and the wait for memory to come back."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from stopbath.devices import Claim, holders, wait_released
from stopbath.devices.fake import FakeLedger
from stopbath.lifecycle import Deadline

if TYPE_CHECKING:
    from pathlib import Path


def test_a_holder_is_found_by_its_open_descriptor(tmp_path: Path) -> None:
    device = tmp_path / "nvidia0"
    device.touch()
    prefix = (str(tmp_path / "nvidia"),)
    assert holders(prefix)[0] == []
    with device.open():
        ((pid, files),) = holders(prefix)[0]
        assert (pid, files) == (os.getpid(), (str(device),))
    assert holders(prefix)[0] == []


class _Ledger(FakeLedger):
    """Gives back at the third look."""

    looks = 0

    def claims(self) -> list[Claim]:
        self.looks += 1
        if self.looks == 3:
            self.release(7)
        return super().claims()


def test_memory_that_comes_back_ends_the_wait() -> None:
    ledger = _Ledger()
    ledger.hold(7, 5)
    ledger.hold(8, 5)
    released = wait_released(ledger, {7}, Deadline.after(30))
    assert released.done
    assert ledger.looks == 3


def test_memory_that_does_not_is_told_with_its_holder_at_the_bound() -> None:
    ledger = FakeLedger()
    ledger.hold(7, 5)
    threads = threading.active_count()
    released = wait_released(ledger, {7}, Deadline.after(0.02))
    assert released.left == (Claim(0, 7, 5),)
    assert not released.done
    assert released.took_s < 0.5
    assert threading.active_count() == threads
