"""Every check of the doctor's, each by itself: one that fails hides no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stopbath.devices import LedgerAbsent, holders, open_ledger
from stopbath.survey import containment, limits
from stopbath.survey.finding import Finding, gib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stopbath.devices import Ledger

__all__ = ["examine", "gpu"]


def gpu(ledger: Ledger | None = None) -> Finding:
    """The driver's ledger, or the reason why there is none."""
    held, _ = holders()
    try:
        book = ledger or open_ledger()
    except LedgerAbsent as error:
        found = f"{error}" + (f"; {len(held)} processes hold device files" if held else "")
        return Finding(
            "GPU driver",
            "note",
            found,
            "device memory is not accounted for; who has a device file open is shown all the same",
            "on a machine with a GPU: pip install 'stopbath[nvidia]' beside the driver",
        )
    try:
        devices = book.devices()
    except LedgerAbsent as error:
        return Finding("GPU driver", "warning", str(error), "no device can be used", "nvidia-smi")
    finally:
        if ledger is None:
            book.close()
    each = ", ".join(
        f"{one.name} {gib(one.used_bytes)} of {gib(one.total_bytes)}" for one in devices
    )
    return Finding("GPU driver", "good", f"{book.driver}: {each or 'no device'}")


_CHECKS: tuple[Callable[[], Finding], ...] = (
    containment.subreaper,
    containment.cgroup,
    containment.pid_namespace,
    containment.freezer,
    containment.first_process,
    limits.runtime_directory,
    limits.shared_memory,
    limits.open_files,
    limits.processes,
    limits.core_dumps,
    limits.ptrace,
    limits.hidden_processes,
    gpu,
    limits.clocks,
)


def examine(checks: Iterable[Callable[[], Finding]] = _CHECKS) -> list[Finding]:
    """Run every check; one that cannot be made says so."""
    found = []
    for check in checks:
        try:
            found.append(check())
        except Exception as error:  # noqa: BLE001  (a doctor that dies of a symptom helps nobody)
            topic = check.__name__.replace("_", " ")
            found.append(Finding(topic, "note", f"could not be checked: {error!r}"))
    return found
