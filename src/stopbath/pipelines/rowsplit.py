"""Step mode on several ranks: each computes a part of the batch's rows, and gets all of them.

The rows of a guided request are its unconditional and its conditional half, so that a single one
on two ranks is what `cfg` is in request mode: a half for each. In company every rank has as many
rows as the others, whosever they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stopbath.pipelines.base import PeerFailed
from stopbath.pipelines.joint import Peers, Verdict
from stopbath.pipelines.likeness import check_close
from stopbath.pipelines.rows import padded

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from stopbath.pipelines.base import Rows

    Denoise = Callable[[Tensor, Tensor, Rows, tuple[int, int]], Tensor]

__all__ = ["RowSplit"]


class RowSplit:
    """Spreads the rows of each model call over the ranks, once `prove` was called on all.

    Every rank has to make the same calls with the same rows, which is the business of the loop.
    """

    def __init__(self, name: str, peers: Peers) -> None:
        self._name = name
        self._peers = peers
        self._calls = 0
        self._dtype: torch.dtype | None = None  # of the prediction
        self.active = False

    def prove(self, run: Callable[[], Tensor]) -> None:
        """Begin to share, and hold what `run` makes then against what it made before.

        Raises:
            ModelUnusable: the rows of this model depend on each other.
        """
        alone = run()
        self.active = True
        check_close(self._name, alone, run(), "serve it without --parallel cfg")

    def denoise(
        self,
        whole: Denoise,
        latents: Tensor,
        timesteps: Tensor,
        rows: Rows,
        size: tuple[int, int],
        *,
        multiple: int,
    ) -> Tensor:
        """Give the prediction for all rows; `multiple` is what a rank's own are padded to.

        Raises:
            PeerFailed: another rank failed in this call, and all leave it.
            PeerLost: another rank is dead.
        """
        self._calls += 1
        total = len(latents)

        def part(tensor: Tensor) -> Tensor:
            ranks = self._peers.world_size
            return padded(tensor, ranks).chunk(ranks)[self._peers.rank]

        mine = part(latents)
        try:
            out = whole(
                padded(mine, multiple),
                padded(part(timesteps), multiple),
                {name: padded(part(tensor), multiple) for name, tensor in rows.items()},
                size,
            )[: len(mine)]
        except Exception:
            # In its place, so that no peer waits for it.
            nothing = torch.zeros_like(mine, dtype=self._dtype)
            self._peers.exchange(nothing, Verdict.FAILED, self._calls)
            raise
        self._dtype = out.dtype
        parts, verdicts = self._peers.exchange(out, Verdict.GO, self._calls)
        failed = [f"rank{rank}" for rank, each in enumerate(verdicts) if each is Verdict.FAILED]
        if failed:
            raise PeerFailed(f"{', '.join(failed)} failed in this step")
        return torch.cat([each.view(out.dtype).view(out.shape) for each in parts])[:total]
