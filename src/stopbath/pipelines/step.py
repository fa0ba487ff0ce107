"""Step mode: denoising steps of different requests in one model call."""

from __future__ import annotations

from collections import OrderedDict
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from stopbath.pipelines.base import ModelUnusable
from stopbath.pipelines.compiled import compile_denoiser, compiling, first_requests
from stopbath.pipelines.diffusers import check_request, warm_up_request
from stopbath.pipelines.families import Flux, StableDiffusion3
from stopbath.pipelines.loader import denoiser_of, load_pipeline, model_info
from stopbath.pipelines.rows import MODEL_ROWS, TEXT_ROWS, padded, steady
from stopbath.pipelines.rowsplit import RowSplit
from stopbath.pipelines.unets import StableDiffusion, StableDiffusionXL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL.Image import Image
    from torch import Tensor

    from stopbath.messages import GenerationRequest, ModelInfo
    from stopbath.pipelines.base import Pipeline, Rows, Sample
    from stopbath.pipelines.families import Family
    from stopbath.pipelines.loader import ModelDefaults
    from stopbath.pipelines.ulysses import UlyssesSplit

__all__ = ["BatchedPipeline"]

_FAMILIES: Final[dict[str, type[Family]]] = {
    "FluxPipeline": Flux,
    "StableDiffusion3Pipeline": StableDiffusion3,
    "StableDiffusionPipeline": StableDiffusion,
    "StableDiffusionXLPipeline": StableDiffusionXL,
}
_TEXTS: Final = 32  # encoded prompts that are kept; one of a large model has some megabytes
# Pictures are decoded together while they are small. The decoder's memory grows with the pixels,
# and a large picture alone keeps a device busy.
_DECODE_PIXELS: Final = 512 * 512


class BatchedPipeline:
    """A diffusers pipeline whose steps serve many requests; implements `StepPipeline`.

    Raises:
        ModelUnusable: at construction, when nobody has taken such a pipeline apart yet.
    """

    def __init__(self, pipe: Any, defaults: ModelDefaults, device: str) -> None:
        self.pipe = pipe
        self.info: ModelInfo = model_info(pipe, defaults, device)
        name = type(pipe).__name__
        if name not in _FAMILIES:
            raise ModelUnusable(
                f"step mode knows {', '.join(_FAMILIES)}, not {name}; serve it with --mode request"
            )
        self._family = _FAMILIES[name](pipe, defaults.max_sequence_length)
        self._stages: Pipeline = self._family
        self._texts: OrderedDict[str, Rows] = OrderedDict()
        self._split: RowSplit | UlyssesSplit | None = None
        self._compiled = False
        self._model_rows, self._text_rows = (MODEL_ROWS, TEXT_ROWS) if device == "cpu" else (1, 1)

    @classmethod
    def load(cls, model: str, device: str) -> BatchedPipeline:
        """Load a checkpoint from disk; see `load_pipeline` for what can go wrong."""
        pipe, defaults = load_pipeline(model, device)
        return cls(pipe, defaults, device)

    def compile(self) -> None:
        """Have the denoiser compiled, in `warm_up`, for any number of rows above one.

        A row's bits may depend on its company then: the compiler chooses how rows are computed.

        Raises:
            ModelUnusable: it cannot be, and why.
        """
        compile_denoiser(self.pipe, self.info.device)
        self._compiled, self._model_rows = True, MODEL_ROWS

    def share(self, split: RowSplit | UlyssesSplit) -> None:
        """Compute with the peers of `split` once it is warm: a loop sees to it that all do."""
        self._split = split

    def warm_up(self) -> None:
        """Make a small picture and drop it, and have a row's bits not depend on the others.

        Raises:
            ModelUnusable: this model cannot be shared with the peers it was given.
        """
        request = warm_up_request(self.info)
        if self._compiled:
            with compiling():
                for first in first_requests(self.info, request):
                    self._made(first)
        elif self._model_rows > 1:
            unguided = msgspec.structs.replace(request, guidance_scale=1.0)
            (sample,) = self._begin([unguided])
            self._model_rows = 1
            steady(self._models(), lambda: self._fewest(sample))
            self._model_rows = MODEL_ROWS
            self._texts.clear()  # encoded before
        if self._split is not None:
            self._split.prove(lambda: self._made(request).latents)
        self.finish([self._made(request)])

    def _models(self) -> list[Any]:
        """Give the denoiser and the text encoders."""
        names = [name for name in self.pipe.components if name.startswith("text_encoder")]
        encoders = [getattr(self.pipe, name) for name in names]
        return [denoiser_of(self.pipe), *(it for it in encoders if it is not None)]

    def _fewest(self, sample: Sample) -> None:
        """Run them for as few rows as there ever are."""
        self._stages.encode([""] * TEXT_ROWS)
        self.step([sample])

    def _made(self, request: GenerationRequest) -> Sample:
        (sample,) = self._begin([request])
        while not sample.over:
            for error in self.step([sample]):
                if error is not None:
                    raise error
        return sample

    # -- prompts ---------------------------------------------------------------------------

    @torch.no_grad()  # type: ignore[untyped-decorator]  # mypy does not follow torch
    def begin(self, requests: Sequence[GenerationRequest]) -> list[Sample | Exception]:
        """See `StepPipeline.begin`."""
        begun: list[Sample | Exception] = []
        try:
            return [*self._begin(requests)]
        except Exception as error:  # noqa: BLE001  (a caller hears of it, as of its own)
            if len(requests) == 1:
                return [error]
        for request in requests:  # somebody's fault: each for itself
            begun += self.begin([request])
        return begun

    def _begin(self, requests: Sequence[GenerationRequest]) -> list[Sample]:
        for request in requests:
            check_request(self.info, request)
        pairs = [(request.prompt, self._negative_of(request)) for request in requests]
        rows = self._encoded([text for pair in pairs for text in pair if text is not None])
        return [
            self._stages.prepare(request, rows[text], None if negative is None else rows[negative])
            for request, (text, negative) in zip(requests, pairs, strict=True)
        ]

    def _negative_of(self, request: GenerationRequest) -> str | None:
        if not self._family.guides(request.guidance_scale):
            return None
        return request.negative_prompt or self._family.no_negative

    def _encoded(self, texts: Sequence[str]) -> dict[str, Rows]:
        """Encode what is not known yet, in one go."""
        wanted = dict.fromkeys(texts)
        known = {text: self._texts[text] for text in wanted if text in self._texts}
        new = [text for text in wanted if text not in known]
        if new:
            filled = new + [""] * (-len(new) % self._text_rows)
            known.update(zip(new, self._stages.encode(filled), strict=False))
        for text in wanted:
            self._texts[text] = known[text]
            self._texts.move_to_end(text)
        while len(self._texts) > _TEXTS:
            self._texts.popitem(last=False)
        return known

    # -- steps -----------------------------------------------------------------------------

    @torch.no_grad()  # type: ignore[untyped-decorator]  # mypy does not follow torch
    def step(self, samples: Sequence[Sample]) -> list[Exception | None]:
        """See `StepPipeline.step`."""
        # Guided ones first, those of one guidance side by side.
        order = sorted(samples, key=lambda s: (s.negative is None, s.guidance))
        times = [sample.timesteps[sample.calls] for sample in order]
        inputs = [_input_of(sample, time) for sample, time in zip(order, times, strict=True)]
        guided = [sample for sample in order if sample.negative is not None]
        parts = [*guided, *order]
        texts = [s.negative or s.positive for s in guided] + [s.positive for s in order]
        out = self._denoise(
            _joined([*inputs[: len(guided)], *inputs]),
            _joined(_rows(parts, [t.reshape(1) for t in [*times[: len(guided)], *times]])),
            {name: _joined(_rows(parts, [t[name] for t in texts])) for name in texts[0]},
            order[0].size,
        )
        counts = [sample.pictures for sample in order]
        half = sum(counts[: len(guided)])
        prediction = _guided(guided, out[:half], out[half : half + sum(counts)])
        errors = {
            id(sample): _advance(sample, time, own)
            for sample, time, own in zip(order, times, prediction.split(counts), strict=True)
        }
        return [errors[id(sample)] for sample in samples]

    def _denoise(
        self, latents: Tensor, timesteps: Tensor, rows: Rows, size: tuple[int, int]
    ) -> Tensor:
        """Call the model for all rows, or have each rank call it for some."""
        multiple, split = self._model_rows, self._split
        if isinstance(split, RowSplit) and split.active:
            whole = self._stages.denoise
            return split.denoise(whole, latents, timesteps, rows, size, multiple=multiple)
        filled = {name: padded(tensor, multiple) for name, tensor in rows.items()}
        return self._stages.denoise(
            padded(latents, multiple), padded(timesteps, multiple), filled, size
        )

    # -- pictures --------------------------------------------------------------------------

    @torch.no_grad()  # type: ignore[untyped-decorator]  # mypy does not follow torch
    def finish(self, samples: Sequence[Sample]) -> list[list[Image]]:
        """See `StepPipeline.finish`."""
        pictures: dict[int, list[Image]] = {}
        by_size: dict[tuple[int, int], list[Sample]] = {}
        for sample in samples:
            by_size.setdefault(sample.size, []).append(sample)
        for size, same in by_size.items():
            images = self._decoded(torch.cat([sample.latents for sample in same]), size)
            for sample in same:
                pictures[id(sample)] = images[: sample.pictures]
                images = images[sample.pictures :]
        return [pictures[id(sample)] for sample in samples]

    def _decoded(self, latents: Tensor, size: tuple[int, int]) -> list[Image]:
        at_once = max(1, _DECODE_PIXELS // (size[0] * size[1]))
        images: list[Image] = []
        for rows in latents.split(at_once):
            images += self._stages.decode(rows, size)
        return images


def _input_of(sample: Sample, time: Tensor) -> Tensor:
    scale = getattr(sample.scheduler, "scale_model_input", None)
    if scale is None:  # flow matching has no such thing
        return sample.latents
    scaled: Tensor = scale(sample.latents, time)
    return scaled


def _rows(samples: Sequence[Sample], single: Sequence[Tensor]) -> list[Tensor]:
    """Give each sample's one row as often as it has pictures."""
    return [
        row if sample.pictures == 1 else row.expand(sample.pictures, *row.shape[1:])
        for sample, row in zip(samples, single, strict=True)
    ]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _guided(guided: Sequence[Sample], without: Tensor, with_text: Tensor) -> Tensor:
    """Apply guidance to the first rows of `with_text`; the rest has none.

    By numbers, as the pipelines do, and not by a tensor of them: that rounds otherwise in half
    precision.
    """
    done: list[Tensor] = []
    at = 0
    for guidance, same in groupby(guided, key=lambda sample: sample.guidance):
        end = at + sum(sample.pictures for sample in same)
        below = without[at:end]
        done.append(below + guidance * (with_text[at:end] - below))
        at = end
    return torch.cat([*done, with_text[at:]])


def _advance(sample: Sample, time: Tensor, prediction: Tensor) -> Exception | None:
    """Have the sample's own scheduler take its step."""
    try:
        sample.latents = sample.scheduler.step(
            prediction, time, sample.latents, **sample.extra, return_dict=False
        )[0]
    except Exception as error:  # noqa: BLE001  (the others of the batch go on)
        return error
    sample.calls += 1
    return None
