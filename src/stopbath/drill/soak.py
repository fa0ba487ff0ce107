"""Thousands of random starts, faults and stops: `python -m stopbath.drill.soak`.

Every choice (how many workers, what each is like, who is killed and when, how the stop is asked
for) comes from the seed and the number of the cycle, so that a run replays exactly: the same
choices, and with `--cycle N` a single one of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from stopbath.drill.seeded import asked_for
from stopbath.drill.soaked import plan_of
from stopbath.lifecycle._process import become_subreaper, children, reap_pid

__all__ = ["main"]

_BATCH = 25  # cycles in one program: groups that follow each other are part of the test
_LATE_S = 0.1
_BATCH_S = 600.0


class Tally(NamedTuple):
    """What came of the cycles so far."""

    cycles: int
    left: list[str]
    worst_late_s: float
    worst_cycle: int
    broken: list[str]


def main(argv: list[str]) -> int:
    """Play the cycles; prints what was left and the worst time past a deadline; the exit code."""
    asked = asked_for(argv, play="soak", about=__doc__, what="cycle", count=2000, plan_of=plan_of)
    became = time.monotonic()
    become_subreaper()
    tally = _play(asked.numbers, asked.seed, asked.jobs)
    took = time.monotonic() - became
    sys.stdout.write(
        f"soak: {tally.cycles} cycles in {took:.0f} s, seed {asked.seed}\n"
        f"left behind: {len(tally.left)} (goal 0)\n"
        f"worst time past a deadline: {tally.worst_late_s * 1000:.0f} ms (goal < 100), "
        f"in cycle {tally.worst_cycle}\n"
    )
    for line in (*tally.left, *tally.broken):
        sys.stdout.write(f"  {line}\n")
    return int(bool(tally.left or tally.broken) or tally.worst_late_s > _LATE_S)


def _play(numbers: list[int], seed: int, jobs: int) -> Tally:
    batches = [numbers[i : i + _BATCH] for i in range(0, len(numbers), _BATCH)][::-1]
    total, running = len(numbers), list[tuple[subprocess.Popen[str], list[int]]]()
    tally = Tally(0, [], 0.0, numbers[0], [])
    with tempfile.TemporaryDirectory(prefix="stopbath-soak-") as home:
        while batches or running:
            while batches and len(running) < jobs:
                batch = batches.pop()
                running.append((_start(batch, seed, home), batch))
            process, batch = running.pop(0)
            try:
                said, _ = process.communicate(timeout=_BATCH_S)
            except subprocess.TimeoutExpired:
                process.kill()
                said, _ = process.communicate()
            tally = _add(tally, said, batch)
            if sys.stderr.isatty():
                sys.stderr.write(f"\r{tally.cycles} of {total}")
        left = _end_left()
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
    return tally._replace(left=[*tally.left, *left])


def _start(batch: list[int], seed: int, home: str) -> subprocess.Popen[str]:
    place = Path(tempfile.mkdtemp(dir=home))
    places = {"XDG_RUNTIME_DIR": str(place), "TMPDIR": str(place)}
    return subprocess.Popen(
        [sys.executable, "-m", "stopbath.drill.soaked", str(seed), *map(str, batch)],
        env={**os.environ, **places},  # noqa: TID251  (passed on, not read)
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def _add(tally: Tally, said: str, batch: list[int]) -> Tally:
    facts: list[dict[str, Any]] = [json.loads(line) for line in said.splitlines()]
    left = [f"cycle {it['cycle']}: {word}" for it in facts for word in it["left"]]
    broken = [f"cycle {it['cycle']}: {it['problem']}" for it in facts if it["problem"]]
    missing = set(batch) - {it["cycle"] for it in facts}
    broken += [f"cycle {number} came to no end" for number in sorted(missing)]
    lates = [
        (tally.worst_late_s, tally.worst_cycle),
        *((it["late_s"], it["cycle"]) for it in facts),
    ]
    return Tally(tally.cycles + len(facts), tally.left + left, *max(lates), tally.broken + broken)


def _end_left() -> list[str]:
    """Whatever has come back to this process was left by a cycle."""
    return [
        f"process {pid}, of nobody knows which cycle" for pid in children() if not reap_pid(pid)
    ]


def _main() -> None:
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    _main()
