"""How the ranks of a replica go through one call together, and leave it together.

A rank that leaves a call alone leaves its peers hanging in a collective. So every exchange of a
call (an all_gather) carries each rank's verdict behind its data, and all ranks act on the worst
of them, which all of them see at the same exchange:

    opening    after the prompt is encoded, before the first step; verdicts only
    step       once a step: half of the noise prediction and the verdict
    closing    after the last step, when the pictures are made; a step's shape, no data

A rank that fails or is cancelled between two exchanges takes part in the next one with its
verdict and no data, which is possible because it knows the shape. A verdict other than GO ends
the call for everybody, and the exchange that carried it was the call's last. So the number of
exchanges agrees on all ranks whatever happens, short of a rank's death, which breaks the
collective for its peers (`PeerLost`). The verdict costs 24 bytes in a collective that is made
anyway; only opening and closing are made for its sake.
"""

from __future__ import annotations

import enum
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist

from stopbath.pipelines.base import Cancelled, PeerFailed, PeerLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from stopbath.pipelines.base import Watch

__all__ = ["JointCall", "JointSplit", "Peers", "Verdict"]

_TRAILER = 3 * 8  # verdict, call id, bytes of data: int64 each


class Verdict(enum.IntEnum):
    """What a rank says of the call, the worst one counts."""

    GO = 0
    CANCEL = 1
    FAILED = 2


class Peers:
    """The ranks of a replica as one collective sees them; torch.distributed is joined already."""

    def __init__(self, rank: int, world_size: int, device: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device

    def exchange(
        self, data: Tensor | None, verdict: Verdict, call_id: int
    ) -> tuple[list[Tensor], list[Verdict]]:
        """Give every rank's data (flat uint8) and verdict, in rank order.

        Raises:
            PeerLost: a peer is dead, or sits in another call, which nothing can mend.
        """
        raw = _bytes_of(data, self.device)
        trailer = torch.tensor([verdict, call_id, raw.numel()], dtype=torch.int64)
        mine = torch.cat([raw, trailer.view(torch.uint8).to(self.device)])
        theirs = [torch.empty_like(mine) for _ in range(self.world_size)]
        try:
            dist.all_gather(theirs, mine)
            trailers = [part[-_TRAILER:].cpu().view(torch.int64).tolist() for part in theirs]
        except RuntimeError as error:
            first = str(error).strip().splitlines()[0]
            raise PeerLost(f"rank{self.rank} lost its peers: {first}") from error
        if any(trailer[1:] != [call_id, raw.numel()] for trailer in trailers):
            raise PeerLost(f"the ranks are not in the same call: {trailers}")
        return [part[:-_TRAILER] for part in theirs], [Verdict(t[0]) for t in trailers]


def _bytes_of(data: Tensor | None, device: str) -> Tensor:
    if data is None:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return data.detach().reshape(-1).contiguous().view(torch.uint8)


class _Phase(enum.Enum):
    """Where a joint call is."""

    BEFORE = "before the opening"
    SHARING = "sharing steps"
    OVER = "over"  # no exchange of this call will follow


class JointCall:
    """One call on one rank: the exchanges it makes, each exactly where the peers make theirs.

    A context: leaving it normally makes the closing exchange, leaving it by an exception of this
    rank's own tells the peers.
    """

    def __init__(self, peers: Peers, call_id: int, cancelled: Callable[[], bool]) -> None:
        self._peers = peers
        self._id = call_id
        self._cancelled = cancelled
        self._phase = _Phase.BEFORE
        self._like: Tensor | None = None

    @property
    def opened(self) -> bool:
        """Whether the opening exchange was made."""
        return self._phase is not _Phase.BEFORE

    @property
    def sharing(self) -> bool:
        """Whether the ranks share steps, so that a cancel has to wait for the next exchange."""
        return self._phase is _Phase.SHARING

    def open(self, like: Tensor | None) -> None:
        """Make the opening exchange. `like` has the shape and dtype of one rank's step data.

        None when the steps are not shared: then nothing more is exchanged in this call.
        """
        self._exchange(None)
        self._phase = _Phase.OVER if like is None else _Phase.SHARING
        self._like = like

    def share(self, mine: Tensor) -> list[Tensor]:
        """Make a step's exchange: give every rank's tensor, in rank order, shaped like `mine`."""
        parts = self._exchange(mine)
        return [part.view(mine.dtype).view(mine.shape) for part in parts]

    def abandon(self) -> None:
        """Make no exchange any more: the peers may sit in another collective for ever."""
        self._phase = _Phase.OVER

    def _exchange(self, data: Tensor | None, own: Verdict = Verdict.GO) -> list[Tensor]:
        if own is Verdict.GO and self._cancelled():
            own = Verdict.CANCEL
        before, self._phase = self._phase, _Phase.OVER  # unless all goes well
        parts, verdicts = self._peers.exchange(data, own, self._id)
        worst = max(verdicts)
        if worst is Verdict.FAILED and own is not Verdict.FAILED:
            names = ", ".join(f"rank{r}" for r, v in enumerate(verdicts) if v is Verdict.FAILED)
            raise PeerFailed(f"{names} failed in this call")
        if worst is Verdict.CANCEL:
            raise Cancelled("given up, on every rank at the same step")
        if worst is Verdict.GO:
            self._phase = before
        return parts

    def __enter__(self) -> Self:
        if self._cancelled():  # before the prompt is encoded: nothing to do but to say so
            self._exchange(None)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._phase is _Phase.OVER:
            return
        if kind is None:
            if self._phase is _Phase.SHARING:
                self._exchange(self._like)
            elif self._phase is _Phase.BEFORE:
                self._exchange(None)
            self._phase = _Phase.OVER
        else:
            self._exchange(self._like, Verdict.FAILED)


class JointSplit:
    """What a `Split` is whose calls are joint: its peers, and the call in hand."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._call: JointCall | None = None

    @property
    def rank(self) -> int:
        """This rank's number in the replica."""
        return self._peers.rank

    @property
    def sharing(self) -> bool:
        """Whether the call in hand shares its steps; see `JointCall.sharing`."""
        return self._call is not None and self._call.sharing

    @contextmanager
    def _joined(self, watch: Watch) -> Iterator[None]:
        try:
            with JointCall(self._peers, watch.call_id, lambda: watch.cancelled) as call:
                self._call = call
                yield
        finally:
            self._call = None
