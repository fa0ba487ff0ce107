"""Request mode: one request through a diffusers pipeline as it is, cancellable between steps."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from stopbath.errors import RequestInvalid
from stopbath.pipelines.base import Cancelled
from stopbath.pipelines.compiled import compile_denoiser, compiling, first_requests
from stopbath.pipelines.loader import (
    QWEN_IMAGE,
    ModelDefaults,
    call_parameters,
    denoiser_of,
    load_pipeline,
    model_info,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from PIL.Image import Image

    from stopbath.messages import GenerationRequest, ModelInfo
    from stopbath.pipelines.base import Split, Watch

__all__ = ["DiffusersPipeline", "check_request", "generators_of", "warm_up_request"]

_WARM_UP_STEPS: Final = 2  # a few schedulers divide by the number of steps less one
_SEEDS: Final = 1 << 64
_QWEN_NOTHING: Final = " "  # the negative prompt its authors use for none


def check_request(info: ModelInfo, request: GenerationRequest) -> None:
    """Refuse with `RequestInvalid` what the model cannot do."""
    for name, size, largest in (
        ("width", request.width, info.max_width),
        ("height", request.height, info.max_height),
    ):
        if size % info.size_multiple or not 0 < size <= largest:
            raise RequestInvalid(
                f"{name} must be a multiple of {info.size_multiple} up to {largest} pixels, "
                f"not {size}",
                "size",
            )
    if request.n < 1 or request.num_inference_steps < 1:
        raise RequestInvalid("n and num_inference_steps must be at least 1")


def generators_of(request: GenerationRequest) -> list[torch.Generator]:
    """Give the generator of each picture: that of seed, seed + 1 and so on."""
    return [
        torch.Generator("cpu").manual_seed((request.seed + i) % _SEEDS) for i in range(request.n)
    ]


def warm_up_request(info: ModelInfo) -> GenerationRequest:
    """Give a request for one picture in a few steps."""
    from stopbath.messages import GenerationRequest

    return GenerationRequest(
        id="warm-up",
        prompt="",
        width=info.width,
        height=info.height,
        seed=0,
        num_inference_steps=_WARM_UP_STEPS,
        guidance_scale=info.guidance_scale,
    )


class _NoWatch:
    """Nobody watches: for the warm-up."""

    call_id = 0
    cancelled = False

    def progress(self, step: int, steps: int) -> None:
        """Do nothing."""


class DiffusersPipeline:
    """Any text-to-image pipeline of diffusers; implements `RequestPipeline`.

    With `split` the ranks of a replica compute each step together.
    """

    def __init__(
        self, pipe: Any, defaults: ModelDefaults, device: str, split: Split | None = None
    ) -> None:
        self.pipe = pipe
        self.info: ModelInfo = model_info(pipe, defaults, device)
        self._split = split
        self._compiled = False
        self._max_sequence_length = defaults.max_sequence_length
        self._accepts = frozenset(call_parameters(pipe))

    @classmethod
    def load(cls, model: str, device: str) -> DiffusersPipeline:
        """Load a checkpoint from disk; see `load_pipeline` for what can go wrong."""
        pipe, defaults = load_pipeline(model, device)
        return cls(pipe, defaults, device)

    def compile(self) -> None:
        """Have the denoiser compiled, in `warm_up`; before `share`.

        Raises:
            ModelUnusable: it cannot be, and why.
        """
        compile_denoiser(self.pipe, self.info.device)
        self._compiled = True

    def share(self, split: Split) -> None:
        """Compute with the peers of `split` from here on.

        Raises:
            ModelUnusable: this model cannot be split like that, and why.
        """
        request = warm_up_request(self.info)
        guided = msgspec.structs.replace(request, guidance_scale=max(2.0, request.guidance_scale))
        split.prove(lambda: self._run(guided, _NoWatch(), decode=False))
        self._split = split

    def warm_up(self) -> None:
        """Make one small picture and drop it, so that the first request is as fast as the next.

        A compiled model makes a few, after which it has nothing left to compile.
        """
        request = warm_up_request(self.info)
        if not self._compiled:
            self.generate(request, _NoWatch())
            return
        with compiling():
            for first in first_requests(self.info, request):
                self.generate(first, _NoWatch())

    def generate(self, request: GenerationRequest, watch: Watch) -> list[Image]:
        """Make the pictures of one request; see `RequestPipeline.generate`."""
        together: AbstractContextManager[object] = nullcontext()
        first = True
        if self._split is not None:
            first = self._split.rank == 0
            together = self._split.together(watch, request.n)
        with together:
            # Inside, so that a rank that refuses the request says so to its peers.
            check_request(self.info, request)
            images: list[Image] = self._run(request, watch, decode=first)
        return images if first else []

    def _run(self, request: GenerationRequest, watch: Watch, *, decode: bool) -> Any:
        """Give the pictures, or the latents where nobody wants to see them."""
        generators = generators_of(request)
        arguments: dict[str, Any] = {
            "prompt": request.prompt,
            "height": request.height,
            "width": request.width,
            "num_inference_steps": request.num_inference_steps,
            "guidance_scale": request.guidance_scale,
            "num_images_per_prompt": request.n,
            "generator": generators[0] if request.n == 1 else generators,
            "output_type": "pil" if decode else "latent",
        }
        if request.negative_prompt:
            # Left out when empty: SDXL treats "none" (zeros) and "" (encoded) differently.
            arguments["negative_prompt"] = request.negative_prompt
        if self.info.family == QWEN_IMAGE:
            arguments["true_cfg_scale"] = arguments.pop("guidance_scale")
            arguments.setdefault("negative_prompt", _QWEN_NOTHING)  # without one it does not guide
        if self._max_sequence_length:
            arguments["max_sequence_length"] = self._max_sequence_length
        if "num_images_per_prompt" not in self._accepts:
            arguments["prompt"] = [request.prompt] * request.n
        arguments = {name: value for name, value in arguments.items() if name in self._accepts}
        with self._step_hook(arguments, watch, request.num_inference_steps):
            return self.pipe(**arguments).images

    def _step_hook(
        self, arguments: dict[str, Any], watch: Watch, steps: int
    ) -> AbstractContextManager[object]:
        """Have the pipeline call us after each step, in the way it offers.

        A cancel ends the pipeline by an exception: its own `interrupt` would still run the
        remaining iterations and decode. With peers it is the split that leaves, at the same
        collective on every rank.
        """

        def after_step(step: int) -> dict[str, Any]:
            watch.progress(step + 1, steps)
            shared = self._split is not None and self._split.sharing
            if watch.cancelled and not shared:
                raise Cancelled(f"given up after step {step + 1} of {steps}")
            return {}  # no tensor is replaced

        if "callback_on_step_end" in self._accepts:
            arguments["callback_on_step_end"] = lambda _pipe, step, _t, _tensors: after_step(step)
            return nullcontext()
        if "callback" in self._accepts and "callback_steps" in self._accepts:
            arguments["callback"] = lambda step, _t, _latents: after_step(step)
            arguments["callback_steps"] = 1
            return nullcontext()
        return _BeforeEachForward(denoiser_of(self.pipe), watch)


class _BeforeEachForward:
    """For pipelines without any callback: a look at the cancel before each forward pass."""

    def __init__(self, denoiser: Any, watch: Watch) -> None:
        self._denoiser, self._watch = denoiser, watch

    def __enter__(self) -> None:
        def look(*_: object) -> None:
            if self._watch.cancelled:
                raise Cancelled("given up between two steps")

        self._handle = self._denoiser.register_forward_pre_hook(look) if self._denoiser else None

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.remove()
