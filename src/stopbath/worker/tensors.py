"""Tensors as blobs and back; the only place that knows both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stopbath.wire import Blob

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["blob_of", "pack", "tensor_of"]


def blob_of(tensor: Tensor) -> Blob:
    """Give a tensor's bytes (C order, from any device), dtype and shape."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw = memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b""
    return Blob(raw, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def tensor_of(blob: Blob) -> Tensor:
    """Give a CPU tensor over a blob's memory, without a copy when it came as a memfd.

    Raises:
        ValueError: no torch dtype of that name, or bytes that do not make the shape.
    """
    dtype = getattr(torch, blob.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no torch dtype is called {blob.dtype!r}")  # noqa: TRY004
    if not blob.nbytes:
        return torch.empty(blob.shape, dtype=dtype)
    data = blob.data
    try:
        # Inline bytes are read-only; torch wants memory of its own then.
        flat = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=dtype)
        return flat.reshape(blob.shape)
    except RuntimeError as error:
        raise ValueError(f"{blob!r} is no tensor: {error}") from error


def pack(value: Any) -> Any:
    """Make a tensor a blob, leave everything else as it is: the `pack` of a channel."""
    return blob_of(value) if isinstance(value, torch.Tensor) else value
