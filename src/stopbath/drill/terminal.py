"""A run in the foreground of a terminal of its own."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Sequence

    from stopbath.drill.scene import Scene

__all__ = ["hang_up", "keystroke", "on_terminal"]

_CONTROLLING = (
    "import fcntl, os, sys, termios;"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)


def on_terminal(scene: Scene, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start it in the foreground of a terminal of its own; its words still go to a file."""
    master, slave = os.openpty()
    scene.notes["terminal"] = master
    scene.deferred.callback(_close_unless_hung_up, scene)
    options.pop("stdin", None)
    try:
        return scene.start(
            [sys.executable, "-c", _CONTROLLING, *argv], stdin=slave, stdout=slave, **options
        )
    finally:
        os.close(slave)


def _close_unless_hung_up(scene: Scene) -> None:
    if not scene.notes.get("hung up"):
        os.close(scene.notes["terminal"])


def keystroke(key: bytes) -> Callable[[Scene], None]:
    """Type a key on the terminal of the run; in a control on another terminal."""

    def inject(scene: Scene) -> None:
        if scene.control:
            master, slave = os.openpty()
            os.write(master, key)
            os.close(slave)
            os.close(master)
        else:
            os.write(scene.notes["terminal"], key)

    return inject


def hang_up(scene: Scene) -> None:
    """Close the terminal of the run."""
    if not scene.control:
        scene.notes["hung up"] = True
        os.close(scene.notes["terminal"])
