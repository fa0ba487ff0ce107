"""`stopbath run -- COMMAND`: any program under the guarantee, unmodified.

Parsed by hand and before any library is imported: the wrapper must cost next to nothing.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any

from stopbath.cli.launch import become_guardian
from stopbath.errors import UsageError

__all__ = ["HELP", "parse", "run"]

HELP = """\
Usage: stopbath run [OPTIONS] -- COMMAND [ARGS]...

  Run any command so that nothing it starts outlives it.

  The first signal is passed on as it came; --drain seconds later, or at a
  second signal, everything of the command's tree gets SIGTERM, then SIGKILL.
  Exits as the command does (128+n for signal n); 125 when something survived,
  126 and 127 as a shell does.

Options:
  --drain S      Seconds the command may take after the first signal.  [10]
  --terminate S  Seconds between SIGTERM and SIGKILL.  [5]
  --kill S       Seconds to wait after SIGKILL.  [2]
  --linger S     Seconds that what the command left may live on after it.  [0]
  --report FILE  Where to write the report of the end.
  --name N       The run's name in the report.  [the command's]
  --capture      Keep the command's last stderr lines for the report.
  --tty          Give the command the terminal, for interactive programs.
  --help         Show this message and exit.
"""

_SECONDS = ("drain", "terminate", "kill", "linger")
_WORDS = ("report", "name")
_FLAGS = ("capture", "tty")


def parse(args: list[str]) -> dict[str, Any]:
    """Read the options; `UsageError` says in one line what is wrong."""
    found: dict[str, Any] = {"drain": 10.0, "terminate": 5.0, "kill": 2.0, "linger": 0.0}
    found |= {"report": None, "name": None, "capture": False, "tty": False}
    rest = list(args)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.removeprefix("--").partition("=")
        if name in _FLAGS and not equals:
            found[name] = True
            continue
        if name not in _SECONDS + _WORDS or not word.startswith("--"):
            raise UsageError(f"run has no option {word}; see stopbath run --help")
        if not equals:
            if not rest:
                raise UsageError(f"{word} needs a value")
            value = rest.pop(0)
        found[name] = _seconds(word, value) if name in _SECONDS else value
    if not rest:
        raise UsageError("run needs a command: stopbath run -- COMMAND")
    return found | {"argv": rest}


def _seconds(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"{option} must be a number of seconds >= 0, not {text}")
    return value


def run(args: list[str]) -> None:
    """Check what was asked for, then become the guardian."""
    if args[:1] in (["--help"], ["-h"]):
        sys.stdout.write(HELP)
        return
    asked = parse(args)
    if asked["tty"] and not os.isatty(0):
        raise UsageError("--tty needs a terminal on stdin")
    argv = asked["argv"]
    become_guardian(
        {
            "kind": "run",
            "name": asked["name"] or os.path.basename(argv[0]),  # noqa: PTH119
            "run_id": os.urandom(8).hex(),
            "worker": "command",
            "argv": argv,
            "capture": asked["capture"],
            "tty": asked["tty"],
            "graces_s": [asked["drain"], asked["terminate"], asked["kill"]],
            "linger_s": asked["linger"],
            "report": asked["report"] and os.path.abspath(asked["report"]),  # noqa: PTH100
        }
    )
