"""A device that is not there, for tests and drills: a ledger, and a module like `pynvml`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from stopbath.devices.base import Claim, Device

__all__ = ["FakeLedger", "FakeNvml"]

_GIB = 1 << 30


class FakeLedger:
    """A ledger in memory: `hold` and `release` are what a process would do."""

    driver = "fake"

    def __init__(self, devices: int = 1, total_bytes: int = 24 * _GIB) -> None:
        self._count, self._total = devices, total_bytes
        self._held: dict[tuple[int, int], int | None] = {}

    def hold(self, pid: int, used_bytes: int | None, device: int = 0) -> None:
        """Claim memory for a process."""
        self._held[device, pid] = used_bytes

    def release(self, pid: int) -> None:
        """Give back everything a process holds."""
        self._held = {key: used for key, used in self._held.items() if key[1] != pid}

    def devices(self) -> list[Device]:
        """Give the devices, with what is claimed on them."""
        return [
            Device(
                number,
                f"FAKE-{number}",
                "Fake device",
                self._total,
                sum(used or 0 for (device, _), used in self._held.items() if device == number),
            )
            for number in range(self._count)
        ]

    def claims(self) -> list[Claim]:
        """Give the claims."""
        return [Claim(device, pid, used) for (device, pid), used in self._held.items()]

    def close(self) -> None:
        """Nothing to let go of."""


class FakeNvml:
    """As much of `pynvml` as is used here, over a `FakeLedger`.

    `fail` maps a function's name to the error it raises from then on, as a driver does that
    was unloaded or a card that fell off the bus.
    """

    class NVMLError(Exception):
        """Base of NVML's errors."""

    class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801  (pynvml's name)
        """No driver."""

    class NVMLError_GpuIsLost(NVMLError):  # noqa: N801  (pynvml's name)
        """The card fell off the bus."""

    def __init__(self, ledger: FakeLedger) -> None:
        self.ledger = ledger
        self.fail: dict[str, Exception] = {}
        self.lost: set[int] = set()
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        """Give a function of NVML."""
        kind, _, function_name = name.partition("nvml")
        if kind or not hasattr(type(self), f"_{function_name}"):
            raise AttributeError(name)
        function = getattr(self, f"_{function_name}")

        def call(*args: Any) -> Any:
            if name in self.fail:
                raise self.fail[name]
            return function(*args)

        return call

    def _Init(self) -> None:  # noqa: N802  (pynvml's names, here and below)
        self.open += 1

    def _Shutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def _SystemGetDriverVersion(self) -> str:  # noqa: N802
        return self.ledger.driver

    def _DeviceGetCount(self) -> int:  # noqa: N802
        return len(self.ledger.devices())

    def _DeviceGetHandleByIndex(self, number: int) -> int:  # noqa: N802
        if number in self.lost:
            raise self.NVMLError_GpuIsLost("GPU is lost")
        return number

    def _DeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        device = self.ledger.devices()[handle]
        return SimpleNamespace(total=device.total_bytes, used=device.used_bytes)

    def _DeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return self.ledger.devices()[handle].uuid

    def _DeviceGetName(self, handle: int) -> bytes:  # noqa: N802  (bytes, as older versions do)
        return self.ledger.devices()[handle].name.encode()

    def _DeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return [
            SimpleNamespace(pid=claim.pid, usedGpuMemory=claim.used_bytes)
            for claim in self.ledger.claims()
            if claim.device == handle
        ]

    def _DeviceGetGraphicsRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802, ARG002
        return []
