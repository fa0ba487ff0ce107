"""Time to ready and memory of `stopbath serve`: ranks that import, and ranks of a zygote."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from benchmarks.resources import pss_mb
from benchmarks.serving import serving
from benchmarks.table import Bench, Row, row
from stopbath.lifecycle._process import children_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BENCHES"]

_RUNS = 3
_WAYS = ("--no-zygote", "--zygote")


def ready() -> Iterator[Row]:
    """One, two and four ranks, each way in turn: seconds to ready, and memory then."""
    for ranks in (1, 2, 4):
        told = [[_start(ranks, way) for way in _WAYS] for _ in range(_RUNS)]
        for way, runs in zip(_WAYS, zip(*told, strict=True), strict=True):
            name = f"{ranks} rank(s), {way.removeprefix('--').replace('-', ' ')}"
            yield row(f"{name}: to ready", [it.ready_s for it in runs], "s", "")
            yield row("  Pss of keeper, server and ranks", [it.pss_mb for it in runs], "MB", "")


class _Start(NamedTuple):
    ready_s: float
    pss_mb: float


def _start(ranks: int, way: str) -> _Start:
    with serving("--replicas", str(ranks), way) as server:
        keeper = server.get("/v1/status")["keeper_pid"]
        return _Start(server.ready_s, sum(map(pss_mb, (keeper, *children_of(keeper)))))


BENCHES: dict[str, Bench] = {"ready": ready}
