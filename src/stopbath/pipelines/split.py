"""Which way a model's work is shared among the ranks of a replica."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stopbath.pipelines.cfg import CfgSplit
from stopbath.pipelines.rowsplit import RowSplit
from stopbath.pipelines.ulysses import UlyssesSplit

if TYPE_CHECKING:
    from stopbath.pipelines.joint import Peers

__all__ = ["split_of"]


def split_of(parallel: str, mode: str, pipe: Any, peers: Peers) -> Any:
    """Give what shares the work of `pipe`: what the `share` of that mode's pipeline takes.

    Raises:
        ModelUnusable: this model cannot be shared like that.
    """
    if parallel == "ulysses":
        return UlyssesSplit(pipe, peers)
    if mode == "step":
        return RowSplit(type(pipe).__name__, peers)
    return CfgSplit(pipe, peers)
