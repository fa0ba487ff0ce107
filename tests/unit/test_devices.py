"""Holders of device files, and device memory around a run."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from stopbath.devices import Claim, holders, wait_released
from stopbath.devices.account import look_before, settle
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


# -- the account of a run

_GIB = 1 << 30


def _settled(ledger: FakeLedger, before: dict[str, Any], **how: Any) -> list[dict[str, Any]]:
    """What is left of device 0; processes below 100 are there, the others are not."""

    def title(pid: int) -> str | None:
        return "stranger" if pid < 100 else None

    how = {"all_seen": True, "ours": {500}} | how
    ours = how.pop("ours")
    found = settle(ledger, before, ours, title, Deadline.after(0), **how)
    return [it for device in found for it in device["left"]]


def test_a_dead_helper_that_nobody_knew_of_is_told_from_a_living_stranger() -> None:
    ledger = FakeLedger()
    ledger.hold(7, 5 * _GIB)
    before = look_before(ledger, {500}, str)
    ledger.hold(8, 2 * _GIB)
    assert _settled(ledger, before) == []
    ledger.hold(501, _GIB)
    (left,) = _settled(ledger, before)
    assert (left["pid"], left["used_bytes"], left["proved"]) == (501, _GIB, True)


@pytest.mark.parametrize(
    ("visible", "seen"),
    [(None, [0, 1]), ("1", [1]), ("FAKE-0", [0]), ("FAKE", [0, 1]), ("", []), ("0, 1", [0, 1])],
)
def test_a_device_that_the_run_does_not_see_is_in_nobodys_way(
    visible: str | None, seen: list[int]
) -> None:
    found = look_before(FakeLedger(devices=2), set(), str, visible)["devices"]
    assert [it["number"] for it in found if it["visible"]] == seen


def test_where_not_every_process_can_be_seen_nothing_is_proved_but_of_ones_own() -> None:
    """A pid of another container's looks like a dead one's from here."""
    ledger = FakeLedger()
    before = look_before(ledger, {500}, str)
    ledger.hold(501, _GIB)
    ledger.hold(500, _GIB)
    proved = {it["pid"]: it["proved"] for it in _settled(ledger, before, all_seen=False)}
    assert proved == {501: False, 500: True}


def test_a_total_proves_nothing_beside_strangers_of_unknown_size() -> None:
    """Under MIG, and in some containers, the driver does not say who holds how much."""
    ledger = FakeLedger()
    ledger.hold(7, None)
    before = look_before(ledger, set(), str)
    ledger.devices = lambda: [it._replace(used_bytes=9 * _GIB) for it in FakeLedger().devices()]  # type: ignore[method-assign]
    assert _settled(ledger, before) == []


def test_a_stranger_that_grew_does_not_count_as_ours() -> None:
    ledger = FakeLedger()
    ledger.hold(7, _GIB)
    before = look_before(ledger, set(), str)
    ledger.hold(7, 9 * _GIB)
    assert _settled(ledger, before) == []
    ledger.release(7)
    assert _settled(ledger, before) == []
