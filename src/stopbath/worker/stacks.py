"""What a rank is doing, written to its stderr: for whoever asks why it makes no progress."""

from __future__ import annotations

import faulthandler
from typing import Final

from stopbath.messages import DUMP_SIGNAL

__all__ = ["on_signal", "write"]

_STDERR: Final = 2


def on_signal() -> None:
    """Write the stacks at `DUMP_SIGNAL`, in C: also while a call holds the interpreter."""
    faulthandler.register(DUMP_SIGNAL, file=_STDERR, all_threads=True, chain=False)


def write() -> None:
    """Write the stacks of all threads now."""
    faulthandler.dump_traceback(file=_STDERR, all_threads=True)
