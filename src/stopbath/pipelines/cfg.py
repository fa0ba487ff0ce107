"""Classifier-free guidance on two ranks: one computes the unconditional half, one the other.

diffusers' pipelines with a batched CFG call give their denoiser 2 n rows, the first n
unconditional, and chunk what comes back. Rank 0 computes the first n rows, rank 1 the others, and
an all_gather gives both ranks all of it, so that scheduler and latents stay equal on both.
"""

from __future__ import annotations

import enum
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from stopbath.pipelines.base import ModelUnusable
from stopbath.pipelines.joint import JointSplit, Peers
from stopbath.pipelines.likeness import far_apart
from stopbath.pipelines.loader import denoiser_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from stopbath.pipelines.base import Watch

__all__ = ["CfgSplit"]

_RANKS: Final = 2
_SAMPLE_NAMES: Final = ("hidden_states", "sample")


class _Mode(enum.Enum):
    """What a forward pass is for."""

    PLAIN = "compute as if nobody watched"
    PROBING = "find out whether the model can be split"
    TOGETHER = "compute with the peer"


class CfgSplit(JointSplit):
    """Stands between a pipeline and its denoiser; implements `Split`.

    One per pipeline. Not thread-safe: a rank computes one call at a time.

    Raises:
        ModelUnusable: at construction, when there is no single denoiser to split.
    """

    def __init__(self, pipe: Any, peers: Peers) -> None:
        super().__init__(peers)
        self._name = type(pipe).__name__
        if peers.world_size != _RANKS:
            raise ModelUnusable(f"cfg parallelism takes 2 ranks, not {peers.world_size}")
        denoiser = denoiser_of(pipe)
        if denoiser is None or getattr(pipe, "transformer_2", None) is not None:
            raise ModelUnusable(
                f"{self._name} has no single denoiser to split; serve it without --parallel cfg"
            )
        self._mode = _Mode.PLAIN
        self._rows = 1  # n of the request in hand
        self._out_channels: int | None = None
        self._out_dtype: torch.dtype | None = None
        # On the instance: hooks, config and device of the module stay what they are.
        self._whole = denoiser.forward
        denoiser.forward = self._forward

    def prove(self, run: Callable[[], Tensor]) -> None:
        """Watch a guided one-picture run, and judge afterwards whether it can be split.

        Raises:
            ModelUnusable: the pipeline makes no batched CFG call, or its halves do not add up.
        """
        self._mode, self._rows = _Mode.PROBING, 1
        try:
            run()
        finally:
            self._mode = _Mode.PLAIN
        if self._out_channels is None:
            raise ModelUnusable(
                f"{self._name} does not run both halves of guidance in one batch; "
                "serve it without --parallel cfg"
            )

    @contextmanager
    def together(self, watch: Watch, rows: int) -> Iterator[None]:
        """Run one call with the peer; `rows` is the number of its pictures.

        Raises what `JointCall` raises.
        """
        self._mode, self._rows = _Mode.TOGETHER, rows
        try:
            with self._joined(watch):
                yield
        finally:
            self._mode = _Mode.PLAIN

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._mode is _Mode.PLAIN:
            return self._whole(*args, **kwargs)
        sample = _sample_of(args, kwargs)
        doubled = sample.shape[0] == _RANKS * self._rows
        if self._mode is _Mode.PROBING:
            out = self._whole(*args, **kwargs)
            if doubled:
                self._probe(sample, out, args, kwargs)
            return out
        call = self._call
        assert call is not None  # noqa: S101  (TOGETHER is only ever set with a call)
        if not call.opened:
            call.open(self._like(sample) if doubled else None)
        if not (doubled and call.sharing):
            return self._whole(*args, **kwargs)
        return (torch.cat(call.share(self._half(self.rank, args, kwargs))),)

    def _half(self, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Compute the rows of one rank: (n, …) of the denoiser's (2 n, …)."""
        rows = _RANKS * self._rows
        out = self._whole(*_part(args, rows, rank), **_part(kwargs, rows, rank))
        half: Tensor = out[0]
        return half

    def _like(self, sample: Tensor) -> Tensor:
        """Give a tensor shaped like one half of the prediction: (n, C out, …)."""
        shape = (self._rows, self._out_channels or 0, *sample.shape[2:])
        return torch.zeros(shape, dtype=self._out_dtype, device=sample.device)

    def _probe(
        self, sample: Tensor, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        reason = self._why_not(sample, out, args, kwargs)
        if reason is not None:
            raise ModelUnusable(f"{self._name} {reason}; serve it without --parallel cfg")
        self._out_channels, self._out_dtype = out[0].shape[1], out[0].dtype

    def _why_not(
        self, sample: Tensor, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str | None:
        if not (isinstance(out, tuple) and len(out) == 1):
            return "asks its denoiser for more than the prediction"
        whole: Tensor = out[0]
        if whole.shape[0] != sample.shape[0] or whole.shape[2:] != sample.shape[2:]:
            return f"turns {list(sample.shape)} into {list(whole.shape)}, which cannot be split"
        halves = torch.cat([self._half(rank, args, kwargs) for rank in range(_RANKS)])
        if halves.shape != whole.shape:
            return "gives halves of another shape than its whole"
        apart = far_apart(whole, halves)
        if apart is not None:
            return f"gives halves that differ from its whole by {apart:.3g}"
        return None


def _sample_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Find the latents among the denoiser's arguments: the first, or named as diffusers does."""
    if args:
        first: Tensor = args[0]
        return first
    for name in _SAMPLE_NAMES:
        if name in kwargs:
            named: Tensor = kwargs[name]
            return named
    raise ModelUnusable("the denoiser is called without latents; serve it without --parallel cfg")


def _part(value: Any, rows: int, rank: int) -> Any:
    """Take one rank's rows of every tensor that has one row per row of the batch.

    What has another first dimension (a scalar timestep, a mask for all) belongs to both.
    """
    if isinstance(value, torch.Tensor):
        batched = value.ndim > 0 and value.shape[0] == rows
        return value.chunk(_RANKS)[rank] if batched else value
    if isinstance(value, dict):
        return {name: _part(item, rows, rank) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_part(item, rows, rank) for item in value)
    return value
