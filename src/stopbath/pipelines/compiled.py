"""The denoiser through torch.compile: seconds at the start for a part of every step after it."""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
import torch.fx.experimental._config

from stopbath.pipelines.base import ModelUnusable
from stopbath.pipelines.loader import denoiser_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stopbath.messages import GenerationRequest, ModelInfo

__all__ = ["compile_denoiser", "compiling", "first_requests"]

_INSTEAD: Final = "serve it without --compile"


def compile_denoiser(pipe: Any, device: str) -> None:
    """Have the denoiser of `pipe` compiled at its next call.

    Once for all numbers of rows and all sizes: a code for each batch size is faster still, and
    costs its compilation whenever a new one comes.

    Raises:
        ModelUnusable: there is no denoiser, or nothing to compile it with.
    """
    denoiser = denoiser_of(pipe)
    if denoiser is None:
        raise ModelUnusable(f"{type(pipe).__name__} has no single denoiser; {_INSTEAD}")
    reason = _nothing_to_compile_with(device)
    if reason is not None:
        raise ModelUnusable(f"--compile needs {reason}; install it, or {_INSTEAD}")
    # Two sizes that happen to be equal at the first call need not be so at the next: without this
    # every other shape of picture is a compilation of its own, in the middle of a request.
    torch.fx.experimental._config.use_duck_shape = False  # noqa: SLF001
    # On the instance: hooks and what splits the model among ranks stay outside.
    denoiser.forward = torch.compile(denoiser.forward, dynamic=True)


def first_requests(info: ModelInfo, request: GenerationRequest) -> list[GenerationRequest]:
    """Give requests after which nothing is left to compile: one row and several, another shape."""
    one = msgspec.structs.replace(request, guidance_scale=1.0)
    lower = info.height - info.size_multiple
    several = msgspec.structs.replace(request, n=2, height=lower or info.height)
    return [request, one, several]


@contextmanager
def compiling() -> Iterator[None]:
    """Make the first calls, in which the compilation happens.

    Raises:
        ModelUnusable: this model cannot be compiled here, and why.
    """
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        first = str(error).strip().splitlines()[0]
        raise ModelUnusable(f"the model cannot be compiled: {first}; {_INSTEAD}") from error


def _nothing_to_compile_with(device: str) -> str | None:
    """Say what is missing."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    if device.startswith("cuda") and importlib.util.find_spec("triton") is None:
        return "triton"
    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError):
        return "a C++ compiler (g++ or clang++)"
    return None
