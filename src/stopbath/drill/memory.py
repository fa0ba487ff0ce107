"""What a scenario does to the memory of a device, and what must be true of it.

Where there is a device it is used; elsewhere, and for what no real driver does at will, a
simulated one stands in (`stopbath.drill.device`), and the result says so.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from stopbath.drill import expectations as so
from stopbath.drill import injections as do
from stopbath.drill.device import simulate
from stopbath.drill.habits import DEVICE_BYTES
from stopbath.drill.needs import gpu
from stopbath.drill.scene import SetupFailed
from stopbath.lifecycle._process import children_of, read_stat

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopbath.drill.device import Keeping
    from stopbath.drill.scenario import Act, Need
    from stopbath.drill.scene import Scene

__all__: list[str] = []

RELEASE_S = 0.5  # which the program of the library face gives its driver, when that keeps memory
_MIB, _GIB = 1 << 20, 1 << 30
_NEARLY_ALL, _NEARLY_NONE = DEVICE_BYTES - 12 * _MIB, 64 * _MIB
_FOREIGN_BYTES = 11 * _GIB


def never_at_will() -> str:
    """Say why a driver that keeps memory is simulated everywhere."""
    return "no real driver keeps memory at will"


def never_sure() -> str:
    """Say why a driver that names a stranger is: in a container it may name nobody."""
    return "whom a real driver names depends on the host"


# -- the device


def held_by(make: Callable[[str], Act], habits: str, *, looks: bool, simulated: Need = gpu) -> Act:
    """Set a run whose worker takes memory of a real device, or of a simulated one.

    `looks`: the guardian looks at the devices, and has looked at them when this returns.
    """

    def setup(scene: Scene) -> None:
        stands_in = bool(simulated())
        if stands_in:
            _simulate(scene)
        scene.notes["used"] = _used(scene)
        make(habits + ("simulated device" if stands_in else "device"))(scene)
        if looks:
            _looked(scene)

    return setup


def _simulate(scene: Scene) -> None:
    scene.notes["device"] = simulate(scene)


def _looked(scene: Scene) -> None:
    """Wait until the guardian has heard of its first look: then its keeper is its only child."""
    front, device = scene.ref("front").pid, scene.notes.get("device")

    def heard() -> bool:
        asked = device is None or device.asked(after_a_death=False)
        return bool(asked) and len(children_of(front)) == 1

    if not scene.until(heard, 10.0):
        raise SetupFailed("nobody has looked at the devices")


def _used(scene: Scene) -> int:
    from stopbath.devices import open_ledger

    device = scene.notes.get("device")
    ledger = open_ledger() if device is None else device
    try:
        return sum(device.used_bytes for device in ledger.devices())
    finally:
        ledger.close()


def _more(scene: Scene) -> int:
    return _used(scene) - int(scene.notes["used"])


def _holder(scene: Scene) -> int:
    """Give the pid of who took memory of the simulated device."""
    told = scene.told("device")
    return int(told[-1]["pid"]) if told else 0


# -- acts


def ask_program(within_s: float) -> Act:
    """Have the program stop its group, and then wait for the driver, as an engine would."""

    def ask(scene: Scene) -> None:
        scene.hit_at = time.monotonic()
        scene.ask("shutdown 2.0")
        scene.ask(f"release {within_s}")

    return ask


def driver_is_late(stop: Act) -> Act:
    """Stop; a simulated driver has the memory back only when it was asked for it in vain, twice.

    A real one has it back when it has.
    """

    def then(scene: Scene) -> None:
        device = scene.notes.get("device")
        if device is not None:
            device.keep("named")
        stop(scene)
        if device is not None:
            waits = scene.until(lambda: device.asked(after_a_death=True) > 1, 3.0)
            over = scene.exit_code() is not None or scene.told("released")
            scene.notes["late"] = "" if waits and not over else "nobody waited for the driver"
            device.give_back()
        scene.let_go()

    return then


def keeps(how: Keeping, stop: Act) -> Act:
    """Have the driver keep what the dead have held, and stop."""

    def inject(scene: Scene) -> None:
        if not scene.control:
            scene.notes["device"].keep(how)
        stop(scene)

    return inject


def stranger_holds(scene: Scene) -> None:
    """Have somebody who has no part in the run hold memory before it starts."""
    _simulate(scene)
    do.innocent()(scene)
    if not scene.control:
        ref = scene.notes["bystander"]
        scene.notes["device"].take(ref.pid, ref.start, _FOREIGN_BYTES)


def named_then_term(scene: Scene) -> None:
    """Stop the run when it has named somebody; while it starts nothing waits for that."""
    scene.until(lambda: "holds" in scene.stderr(), 3.0)
    so.term()(scene)


def let_go(scene: Scene) -> None:
    """Have the program of the library face end; a run has been asked to."""
    scene.let_go()


# -- checks


def counted(scene: Scene) -> str:
    """The driver counts at least what was taken."""
    more = _more(scene)
    return "" if more > _NEARLY_ALL else f"the device holds only {more // _MIB} MiB more"


def kept(scene: Scene) -> str:
    """Who took the memory is dead, and the driver counts it all the same."""
    pid = _holder(scene)
    found = scene.shows(lambda: read_stat(pid) is None and _more(scene) > _NEARLY_ALL)
    return "" if found else f"pid {pid} lives, or its memory is back"


def names_stranger(scene: Scene) -> str:
    """The driver names somebody who holds memory, and who is not of the run."""
    pid = scene.notes["bystander"].pid
    named = any(claim.pid == pid for claim in scene.notes["device"].claims())
    return "" if named else f"the driver does not name pid {pid}"


def back(scene: Scene) -> str:
    """The driver has everything back."""
    scene.until(lambda: _more(scene) < _NEARLY_NONE, 2.0)
    more = _more(scene)
    return "" if more < _NEARLY_NONE else f"the device still holds {more // _MIB} MiB"


def waited(scene: Scene) -> str:
    """Nobody said "stopped" while memory was out; only a simulated driver is late for sure."""
    return str(scene.notes.get("late", ""))


def told_back(scene: Scene) -> str:
    """By the program's own account everything was given back."""
    told = scene.told("released")
    return "" if told and told[-1]["of"] and not told[-1]["left"] else f"released: {told[-1:]}"


def reported_back(scene: Scene) -> str:
    """By the report the devices were looked at, and everything was given back."""
    report = scene.report()
    devices = report.get("devices") or []
    if not devices:
        return f"the devices were not looked at: {report.get('devices_absent')}"
    left = [it for device in devices for it in device["left"]]
    return f"not given back: {left}" if left else ""


def told_holder(scene: Scene) -> str:
    """By the program's own account one process has not given back, and it waited no longer."""
    told = scene.told("released")
    if not told or told[-1]["left"] != [_holder(scene)]:
        return f"released: {told[-1:]}, not pid {_holder(scene)}"
    took = float(told[-1]["took"])
    return "" if RELEASE_S <= took < RELEASE_S + 1 else f"waited {took:.3f} s"


def _says_left(scene: Scene, who: str) -> str:
    """The run waited two seconds, and then said who has not given back."""
    words = f"device 0: 0.5 GiB not given back in N s: {who}"
    found = re.search(re.escape(words).replace("N", r"(\d+\.\d)"), scene.stderr())
    waited = float(found[1]) if found else 0.0
    return "" if waited >= 2.0 else f"stderr lacks {words!r}, with N >= 2"  # noqa: PLR2004


def says_holder(scene: Scene) -> str:
    """It was the pid of the dead."""
    return _says_left(scene, f"pid {_holder(scene)}, dead or hidden")


def says_nobody(scene: Scene) -> str:
    """It was nobody: only the device's total tells of it."""
    return _says_left(scene, "no process is named for it")


def says_stranger(scene: Scene) -> str:
    """The start named who is in its way."""
    pid = scene.notes["bystander"].pid
    return so.says(f"device 0: pid {pid} (sleep 600) holds 11.0 GiB of 24.0 GiB")(scene)
