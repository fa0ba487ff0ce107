"""What a rank is doing, written to its stderr: for whoever asks why it makes no progress."""

from __future__ import annotations

import faulthandler
from typing import Final

__all__ = ["write"]

_STDERR: Final = 2


def write() -> None:
    """Write the stacks of all threads now.

    From a thread that has the interpreter, so that no frame changes meanwhile. Where none can,
    `DUMP_SIGNAL` has the main thread's written (`lifecycle._handshake`).
    """
    faulthandler.dump_traceback(file=_STDERR, all_threads=True)
