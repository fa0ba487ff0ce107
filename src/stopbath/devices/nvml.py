"""The NVIDIA driver's own ledger, through nvidia-ml-py (the extra `nvidia`)."""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stopbath.devices.base import Claim, Device, LedgerAbsent

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NvmlLedger", "open_ledger"]


class NvmlLedger:
    """NVML, initialised; foreign errors become `LedgerAbsent` here and nowhere else.

    Args:
        nvml: The module `pynvml`, or one that behaves like it.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        with self._words():
            nvml.nvmlInit()
            self.driver = _text(nvml.nvmlSystemGetDriverVersion())

    @contextmanager
    def _words(self) -> Iterator[None]:
        try:
            yield
        except self._nvml.NVMLError as error:
            raise LedgerAbsent(f"NVML: {error}") from error

    def devices(self) -> list[Device]:
        """Give every device NVML can reach; one that fell off the bus does not hide the rest."""
        nvml, found = self._nvml, []
        with self._words():
            for number, handle in self._handles():
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                uuid = _text(nvml.nvmlDeviceGetUUID(handle))
                name = _text(nvml.nvmlDeviceGetName(handle))
                found.append(Device(number, uuid, name, int(memory.total), int(memory.used)))
        return found

    def claims(self) -> list[Claim]:
        """Give compute, MPS and graphics processes alike, each once per device."""
        found: dict[tuple[int, int], Claim] = {}
        with self._words():
            for number, handle in self._handles():
                for kind in ("Graphics", "MPSCompute", "Compute"):
                    read = getattr(self._nvml, f"nvmlDeviceGet{kind}RunningProcesses", None)
                    for process in read(handle) if read is not None else ():
                        pid, used = int(process.pid), process.usedGpuMemory
                        found[number, pid] = Claim(number, pid, None if used is None else int(used))
        return list(found.values())

    def _handles(self) -> Iterator[tuple[int, Any]]:
        for number in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(number)
                self._nvml.nvmlDeviceGetMemoryInfo(handle)  # a lost one may still have a handle
            except self._lost():
                continue
            yield number, handle

    def _lost(self) -> tuple[type[Exception], ...]:
        kinds = (
            getattr(self._nvml, f"NVMLError_{name}", None)
            for name in ("GpuIsLost", "NotFound", "NoPermission")
        )
        return tuple(kind for kind in kinds if kind is not None)

    def close(self) -> None:
        """Let go of NVML."""
        with self._words():
            self._nvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def open_ledger(nvml: Any = None) -> NvmlLedger:
    """Open the driver's ledger; `LedgerAbsent` says why there is none."""
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            raise LedgerAbsent(
                "nvidia-ml-py is not installed: pip install 'stopbath[nvidia]'"
            ) from None
    return NvmlLedger(nvml)
