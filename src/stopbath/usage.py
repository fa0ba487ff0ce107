"""The one error of the command line, apart from the others: `run` imports nothing else."""

from __future__ import annotations

__all__ = ["UsageError"]


class UsageError(Exception):
    """The command line asks for something that cannot be; one line, exit code 2."""
