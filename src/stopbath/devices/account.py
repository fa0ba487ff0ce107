"""Device memory around a run: who held some before it, and what was not given back after it.

Per process where the driver tells, because others share the card; by the device's total where
it names nobody. Deadlines bound the wait, and what is left is named.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from stopbath.devices.base import LedgerAbsent

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from stopbath.devices.base import Claim, Device, Ledger
    from stopbath.lifecycle import Deadline

    Title = Callable[[int], str | None]  # its command line; None when it is not to be seen

__all__ = ["look_before", "settle"]

_LOOK_EVERY_S = 0.01  # the driver tells of nothing by itself; the wait is bounded and rare
_SLACK_BYTES = 64 << 20  # a driver's own books, and what strangers take and give meanwhile


def look_before(
    ledger: Ledger, ours: Collection[int], title: Title, visible: str | None = None
) -> dict[str, Any]:
    """Give what the devices hold at the start of a run, as JSON-able data.

    `ours` are the processes of the run's own tree: it may have begun to use a device already.
    `visible` is CUDA_VISIBLE_DEVICES: on other devices nobody is in the run's way.
    """
    claims = ledger.claims()
    mine = [claim for claim in claims if claim.pid in ours]
    return {
        "driver": ledger.driver,
        "devices": [
            _without(device, mine) | {"visible": _is_visible(device, visible)}
            for device in ledger.devices()
        ],
        "foreign": [
            claim._asdict() | {"command": title(claim.pid)}
            for claim in claims
            if claim.pid not in ours
        ],
    }


def _is_visible(device: Device, visible: str | None) -> bool:
    """Whether a device is one of those; by number, or by its UUID or how that begins."""
    if visible is None:
        return True
    words = [word.strip() for word in visible.split(",")]
    return any(
        word and (word == str(device.number) or device.uuid.startswith(word)) for word in words
    )


def _without(device: Device, mine: Sequence[Claim]) -> dict[str, Any]:
    """Take what the run holds already off the device's total; None where it is not told."""
    used = [claim.used_bytes for claim in mine if claim.device == device.number]
    told = None if None in used else device.used_bytes - sum(it or 0 for it in used)
    return dict(device._asdict(), used_bytes=told)


def settle(
    ledger: Ledger,
    before: dict[str, Any],
    ours: Collection[int],
    title: Title,
    by: Deadline,
    *,
    all_seen: bool,
) -> list[dict[str, Any]]:
    """Wait until everything is given back, or `by`; gives the report's `devices`.

    `ours` are dead, by whoever calls. `all_seen`: every process of this host can be seen from
    here, so that one the driver names and nobody sees is dead, and not another container's.
    """
    began = time.monotonic()
    while True:
        try:
            devices, claims = ledger.devices(), ledger.claims()
        except LedgerAbsent:
            if by.passed:
                raise
            devices, claims = (), ()
        found = [_settled(it, before, claims, ours, title, all_seen=all_seen) for it in devices]
        if by.passed or (found and not any(it["left"] for it in found)):
            took = round(time.monotonic() - began, 4)
            return [it | {"waited_s": took} for it in found]
        time.sleep(min(_LOOK_EVERY_S, by.left_s()))


def _settled(
    device: Device,
    before: dict[str, Any],
    claims: Sequence[Claim],
    ours: Collection[int],
    title: Title,
    *,
    all_seen: bool,
) -> dict[str, Any]:
    """Compare one device with what it was at the start. Pure."""
    then = next((it for it in before["devices"] if it["uuid"] == device.uuid), None)
    foreign = [it for it in before["foreign"] if it["device"] == device.number]
    known = {it["pid"] for it in foreign}
    here = [claim for claim in claims if claim.device == device.number]
    left = []
    for claim in here:
        if claim.pid in known:
            continue
        mine, command = claim.pid in ours, title(claim.pid)
        if mine or command is None:
            why = "still there" if mine and command else "dead or hidden"
            left.append(_left(claim.pid, claim.used_bytes, why, proved=mine or all_seen))
    used_before = None if then is None else then["used_bytes"]
    strangers = [claim.used_bytes for claim in here if all(claim.pid != it["pid"] for it in left)]
    over = _unexplained(device.used_bytes, used_before, strangers, foreign)
    if over is not None and over > _SLACK_BYTES and not left:
        left.append(_left(None, over, "no process is named for it", proved=all_seen))
    return {
        "number": device.number,
        "uuid": device.uuid,
        "name": device.name,
        "total_bytes": device.total_bytes,
        "used_before_bytes": used_before,
        "used_after_bytes": device.used_bytes,
        "foreign": [{key: it[key] for key in ("pid", "used_bytes", "command")} for it in foreign],
        "left": left,
    }


def _unexplained(
    used: int,
    used_before: int | None,
    strangers: Sequence[int | None],
    foreign: Sequence[dict[str, Any]],
) -> int | None:
    """Give what the total has grown by beyond what strangers took; None where that is not told."""
    at_first: list[int | None] = [it["used_bytes"] for it in foreign]
    if used_before is None or None in strangers or None in at_first:
        return None
    return used - used_before - sum(it or 0 for it in strangers) + sum(it or 0 for it in at_first)


def _left(pid: int | None, used_bytes: int | None, why: str, *, proved: bool) -> dict[str, Any]:
    return {"pid": pid, "used_bytes": used_bytes, "why": why, "proved": proved}
