"""From a command to the guardian: this process replaces itself by a bare interpreter."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, NoReturn

import stopbath.lifecycle

__all__ = ["become_guardian"]


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
    data = memoryview(json.dumps(job).encode())
    while data:
        data = data[os.write(fd, data) :]
    os.lseek(fd, 0, os.SEEK_SET)
    guardian = os.path.join(os.path.dirname(stopbath.lifecycle.__file__), "_guardian.py")  # noqa: PTH118, PTH120  (pathlib costs 5 ms)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-I", "-S", guardian, str(fd)])  # noqa: S606
