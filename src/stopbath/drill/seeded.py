"""What a play at random is asked for on its command line; every choice comes from a seed."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Asked", "asked_for"]


class Asked(NamedTuple):
    """Which numbers are to be played, how many of them at a time."""

    seed: int
    jobs: int
    numbers: list[int]


def asked_for(
    argv: list[str],
    *,
    play: str,
    about: str | None,
    what: str,
    count: int,
    plan_of: Callable[[int, int], object],
) -> Asked:
    """Read the options; a single one and `--plans` print what was chosen, the latter only that."""
    parser = argparse.ArgumentParser(prog=f"stopbath.drill.{play}", description=about)
    parser.add_argument(f"--{what}s", type=int, default=count, dest="count")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        f"--{what}", type=int, dest="single", help="play this one alone, and say what it does"
    )
    parser.add_argument("--plans", action="store_true", help="print the choices, play nothing")
    asked = parser.parse_args(argv)
    numbers = list(range(asked.count)) if asked.single is None else [asked.single]
    if asked.plans or asked.single is not None:
        for number in numbers:
            sys.stdout.write(f"{number}: {plan_of(asked.seed, number)}\n")
    if asked.plans:
        raise SystemExit(0)
    return Asked(asked.seed, asked.jobs, numbers)
