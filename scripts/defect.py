"""What a defect is: a name, the tests that are to notice it, and what is changed."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Change", "Mutant", "one"]


class Change(NamedTuple):
    """Text of one file that is replaced; it must be there exactly once."""

    file: str
    old: str
    new: str


class Mutant(NamedTuple):
    """A defect, and the tests that are to notice it."""

    name: str
    tests: tuple[str, ...]
    changes: tuple[Change, ...]


def one(file: str, old: str, new: str) -> Change:
    """Change the lifecycle layer."""
    return Change(f"lifecycle/{file}", old, new)
