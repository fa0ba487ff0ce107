"""`stopbath run -- COMMAND`: any program under the guarantee, unmodified.

Parsed by hand and before any library is imported: the wrapper must cost next to nothing.
"""

from __future__ import annotations

import os
import sys

from stopbath.cli.launch import LEDGERS, become_guardian, ledger_command
from stopbath.usage import UsageError

TYPE_CHECKING = False  # `typing` costs the start of `run` 3 ms
if TYPE_CHECKING:
    from typing import Any

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
  --watch NAME[:COUNT]
                 So many processes whose title has NAME in it must live (device:
                 that have a GPU open); may be given again. When too few do, the
                 command is ended, and its exit code is 125 if it says 0 itself.
  --watch-within S
                 Seconds those may take to come to live.  [60]
  --remove-inferred
                 Remove lock files of the command, too, and shared memory that
                 was born during the run and that nobody holds.
  --ledger WHEN  Compare device memory before and after, and wait for its
                 release: auto (where there is an NVIDIA device), on or off.  [auto]
  --isolate pid  Run it in a PID namespace; needs CAP_SYS_ADMIN.
  --help         Show this message and exit.
"""

_SECONDS = ("drain", "terminate", "kill", "linger", "watch-within")
_WORDS = ("report", "name", "isolate", "watch", "ledger")
_CHOICES = {"isolate": ("pid",), "ledger": LEDGERS}
_FLAGS = ("capture", "tty", "remove-inferred")


def parse(args: list[str]) -> dict[str, Any]:
    """Read the options; `UsageError` says in one line what is wrong."""
    found: dict[str, Any] = {"drain": 10.0, "terminate": 5.0, "kill": 2.0, "linger": 0.0}
    found |= {
        "report": None,
        "name": None,
        "isolate": None,
        "watch": [],
        "watch-within": 60.0,
        "ledger": "auto",
    }
    found |= dict.fromkeys(_FLAGS, False)
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
        if name == "watch":
            found["watch"].append(_watch(value))
        else:
            found[name] = _seconds(word, value) if name in _SECONDS else value
    if not rest:
        raise UsageError("run needs a command: stopbath run -- COMMAND")
    return _checked(found) | {"argv": rest}


def _checked(found: dict[str, Any]) -> dict[str, Any]:
    for name, choices in _CHOICES.items():
        if found[name] is not None and found[name] not in choices:
            raise UsageError(f"--{name} takes {' or '.join(choices)}, not {found[name]}")
    return found


def _watch(text: str) -> tuple[str, int]:
    """Read NAME or NAME:COUNT; a name may hold colons itself, as titles of engines do."""
    name, colon, count = text.rpartition(":")
    if not colon or not count.isdecimal():
        name, count = text, "1"
    if not name or int(count) < 1:
        raise UsageError(f"--watch takes NAME or NAME:COUNT with a count >= 1, not {text!r}")
    return name, int(count)


def _seconds(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
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
            "watch": asked["watch"],
            "watch_within_s": asked["watch-within"],
            "remove_inferred": asked["remove-inferred"],
            "isolate": asked["isolate"],
            "ledger": ledger_command(asked["ledger"]),
            "report": asked["report"] and _absolute(asked["report"]),
            "coerced": _coerced(),
        }
    )


def _absolute(path: str) -> str:
    try:
        return os.path.abspath(path)  # noqa: PTH100
    except FileNotFoundError:
        raise UsageError("--report needs a whole path: the current directory is gone") from None


def _coerced() -> bool:
    """Whether Python has put LC_CTYPE into its own environment (PEP 538); no command's business."""
    if not os.environ.get("LC_CTYPE", "").upper().startswith(("C.UTF", "UTF")):  # noqa: TID251  (not ours to be told by)
        return False
    try:
        with open("/proc/self/environ", "rb") as file:  # noqa: PTH123  (what it was started with)
            return b"\0LC_CTYPE=" not in b"\0" + file.read()
    except OSError:
        return False
