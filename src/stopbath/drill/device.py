"""A simulated device, for hosts without one and for faults that no real driver has at will.

What is simulated is the driver, and only that: a module `pynvml`, found on PYTHONPATH before any
other, whose books are what the scenario's processes have told. All that asks it (the look of the
guardian, the ledger, the account, the wait) is the product's own, and knows nothing of it.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, NamedTuple

from stopbath.devices.base import Claim
from stopbath.devices.fake import FakeLedger, FakeNvml
from stopbath.drill.habits import read_told
from stopbath.lifecycle._process import read_stat

if TYPE_CHECKING:
    from pathlib import Path

    from stopbath.devices.base import Device
    from stopbath.drill.scene import Scene

    Keeping = Literal["named", "nameless"]

__all__ = ["SimulatedDevice", "driver", "simulate"]

_MODULE = """\
from pathlib import Path
from stopbath.drill.device import driver
_driver = driver(Path({home!r}))
def __getattr__(name): return getattr(_driver, name)
"""


class _Entry(NamedTuple):
    """Memory that a process has taken, and that the driver does not have back."""

    pid: int
    used_bytes: int
    alive: bool


class SimulatedDevice(FakeLedger):
    """One device of 24 GiB. Memory is back with the death of who took it, unless it is kept.

    Args:
        home: The scene's folder.
        notes: Whether to note each time that somebody asks for the claims.
    """

    driver = "simulated"

    def __init__(self, home: Path, *, notes: bool = False) -> None:
        super().__init__()
        self._told, self._keeping, self._asked = home / "told", home / "keeps", home / "asked"
        self._notes = notes

    # -- the driver's side

    def devices(self) -> list[Device]:
        """Give the device; its total counts what nobody is named for, too."""
        used = sum(it.used_bytes for it in self._entries())
        return [it._replace(used_bytes=used) for it in super().devices()]

    def claims(self) -> list[Claim]:
        """Give the processes that the driver names."""
        entries, keeping = self._entries(), self._kept()
        if self._notes:
            with self._asked.open("a") as file:
                file.write("." if all(it.alive for it in entries) else "+")
        return [Claim(0, it.pid, it.used_bytes) for it in entries if it.alive or keeping == "named"]

    def _entries(self) -> list[_Entry]:
        found = []
        for fact in read_told(self._told):
            if fact["who"] == "device":
                stat = read_stat(fact["pid"])
                alive = stat is not None and stat.start == fact["start"] and stat.state != "Z"
                found.append(_Entry(fact["pid"], fact["bytes"], alive))
        kept = self._kept()
        return [it for it in found if it.alive or kept]

    def _kept(self) -> str:
        with suppress(FileNotFoundError):  # given back, perhaps between two looks
            return self._keeping.read_text()
        return ""

    # -- the scene's side

    def take(self, pid: int, start: int, used_bytes: int) -> None:
        """Have a process that knows nothing of it hold memory."""
        fact = {"who": "device", "pid": pid, "start": start, "bytes": used_bytes}
        with self._told.open("a") as file:
            file.write(json.dumps(fact) + "\n")

    def keep(self, how: Keeping) -> None:
        """From now on keep what the dead have held, and name them for it or nobody."""
        beside = self._keeping.with_suffix(".new")
        beside.write_text(how)
        beside.replace(self._keeping)

    def give_back(self) -> None:
        """Have back what the dead have held."""
        self._keeping.unlink(missing_ok=True)

    def asked(self, *, after_a_death: bool) -> int:
        """Count how often the claims were asked for, in all or while memory of the dead was out."""
        said = self._asked.read_text() if self._asked.exists() else ""
        return said.count("+") if after_a_death else len(said)


def driver(home: Path) -> FakeNvml:
    """Give what stands in for the module `pynvml`."""
    return FakeNvml(SimulatedDevice(home, notes=True))


def simulate(scene: Scene) -> SimulatedDevice:
    """Put the driver in front of any other for all that this scene starts."""
    folder = scene.folder / "driver"
    folder.mkdir()
    (folder / "pynvml.py").write_text(_MODULE.format(home=str(scene.folder)))
    path = [str(folder), *filter(None, [scene.env.get("PYTHONPATH")])]
    scene.env["PYTHONPATH"] = os.pathsep.join(path)
    scene.env.pop("CUDA_VISIBLE_DEVICES", None)  # of this host's own devices
    return SimulatedDevice(scene.folder)
