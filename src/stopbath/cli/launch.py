"""From a command to the guardian: this process replaces itself by a bare interpreter."""

from __future__ import annotations

import marshal
import os
import sys

TYPE_CHECKING = False  # `typing` costs the start of `run` 3 ms
if TYPE_CHECKING:
    from typing import Any, NoReturn

__all__ = ["LEDGERS", "become_guardian", "ledger_command"]

LEDGERS = ("auto", "on", "off")
"""Whether device memory is looked at: where there is a device, always, never."""


def ledger_command(asked: str) -> list[str] | None:
    """Give the command that looks at device memory for the guardian, if it is to be looked at."""
    if asked == "off" or (asked == "auto" and not _device_there()):
        return None
    return [sys.executable, "-P", "-m", "stopbath.devices.look"]


def _device_there() -> bool:
    try:
        names = os.listdir("/dev")  # noqa: PTH208  (pathlib costs 5 ms)
    except OSError:
        return False
    return any(name[:6] == "nvidia" and name[6:].isdigit() for name in names) or "dxg" in names


def become_guardian(job: dict[str, Any]) -> NoReturn:
    """Exec the guardian with `job`, which travels in an anonymous file.

    Not on the command line, where everybody on the machine could read an API key. The exec
    gives back the memory of everything this process has imported.
    """
    for usual in (0, 1, 2):
        try:
            os.fstat(usual)
        except OSError:  # closed: whatever is opened next would become the command's stdin
            os.open(os.devnull, os.O_RDWR)
    fd = os.memfd_create("stopbath-job", 0)  # survives the exec
    data = memoryview(marshal.dumps(job))
    while data:
        data = data[os.write(fd, data) :]
    os.lseek(fd, 0, os.SEEK_SET)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120  (pathlib costs 5 ms)
    guardian = os.path.join(package, "lifecycle", "_guardian.py")  # noqa: PTH118
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed at the start
            stream.flush()
    os.execv(sys.executable, [sys.executable, "-I", "-S", guardian, str(fd)])  # noqa: S606
