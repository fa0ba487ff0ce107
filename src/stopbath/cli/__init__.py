"""The command line.

`stopbath serve` and `stopbath run` replace themselves by the guardian, a bare interpreter; the
other commands are ordinary ones.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry of the console script; leaves with the command's exit code."""
    from stopbath.usage import UsageError

    try:
        if sys.argv[1:2] == ["run"]:
            from stopbath.cli.run import run

            run(sys.argv[2:])
        else:
            from stopbath.cli.app import app

            app()
    except UsageError as error:
        sys.stderr.write(f"stopbath: {error}\n")
        raise SystemExit(2) from None
