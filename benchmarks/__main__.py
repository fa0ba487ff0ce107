"""Run every bench, or the named ones, and print medians and spread."""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING

from benchmarks import compiled, engine, lifecycle, ready, resources, serving, throughput, wrappers

if TYPE_CHECKING:
    from benchmarks.table import Bench

BENCHES: dict[str, Bench] = {
    **lifecycle.BENCHES,
    **serving.BENCHES,
    **ready.BENCHES,
    **engine.BENCHES,
    **throughput.BENCHES,
    **resources.BENCHES,
    **compiled.BENCHES,
    **wrappers.BENCHES,
}


def main(names: list[str]) -> int:
    """Print the table of each bench asked for; 2 when one is unknown."""
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        print(f"no bench is called {unknown[0]}; there are: {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    print(f"# {platform.system()} {platform.release()}, Python {platform.python_version()}")
    print(f"{'what':<44} {'median':>9} {'p99/max':>9} {'goal':>10}")
    for name in names or BENCHES:
        for row in BENCHES[name]():
            print(row.line(), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
