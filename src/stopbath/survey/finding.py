"""What the doctor says: one thing found, what follows from it, and what would help."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

__all__ = ["Finding", "Level", "gib", "kernel_value"]

Level = Literal["good", "note", "warning"]


class Finding(NamedTuple):
    """One line of the doctor's.

    `good` needs nothing; a `note` is a limit that is lived with; a `warning` costs a guarantee
    or a stop in time. `consequence` and `remedy` are empty where there is none.
    """

    topic: str
    level: Level
    found: str
    consequence: str = ""
    remedy: str = ""


def kernel_value(path: str) -> str | None:
    """Read one value of the kernel's; None where it has none to read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def gib(count: float) -> str:
    """Say bytes in the unit a person would use."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:  # noqa: PLR2004
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
