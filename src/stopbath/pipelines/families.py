"""The families of step mode: stages of their diffusers pipelines, for rows of many requests.

What is computed here follows the `__call__` of the pipelines in diffusers 0.42, and the tests
hold it against them. What those pipelines keep in themselves (timesteps, history, guidance) is
in a `Sample` here, so that requests do not meet.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.utils.torch_utils import randn_tensor

from stopbath.pipelines.base import Sample
from stopbath.pipelines.diffusers import generators_of
from stopbath.pipelines.loader import call_parameters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL.Image import Image
    from torch import Tensor

    from stopbath.messages import GenerationRequest
    from stopbath.pipelines.base import Rows

__all__ = ["Family", "Flux", "StableDiffusion3"]


class Family:
    """What the families have in common; implements `Pipeline` but for what raises here."""

    max_shift: ClassVar[float] = 1.15
    no_negative: str | None = ""
    """The text that stands for no negative prompt; None for zeros instead of one."""

    def __init__(self, pipe: Any, max_sequence_length: int | None) -> None:
        self.pipe = pipe
        self.device: Any = pipe._execution_device  # noqa: SLF001  (as the pipeline itself asks)
        parameter = call_parameters(pipe).get("max_sequence_length")
        self._length = max_sequence_length or (parameter.default if parameter else None)

    def guides(self, guidance: float) -> bool:
        """Whether a guidance scale means a second, unconditional half."""
        return guidance > 1.0

    def encode(self, texts: Sequence[str]) -> list[Rows]:
        """See `Pipeline.encode`."""
        whole = self._encode(list(texts))
        return [{name: rows[i : i + 1] for name, rows in whole.items()} for i in range(len(texts))]

    def prepare(self, request: GenerationRequest, text: Rows, negative: Rows | None) -> Sample:
        """See `Pipeline.prepare`."""
        size = request.width, request.height
        generators = generators_of(request)
        scheduler = copy.deepcopy(self.pipe.scheduler)
        dtype = next(iter(text.values())).dtype
        shape = (request.n, *self._latent_shape(size))
        noise = randn_tensor(shape, generator=generators, device=self.device, dtype=dtype)
        self._schedule(scheduler, request.num_inference_steps, shape)
        own = self._own_rows(size, request.guidance_scale, dtype)
        if negative is None:
            negative = {name: torch.zeros_like(rows) for name, rows in text.items()}
        return Sample(
            size=size,
            guidance=request.guidance_scale,
            positive={**text, **own},
            negative={**negative, **own} if self.guides(request.guidance_scale) else None,
            latents=self._first(noise, scheduler),
            scheduler=scheduler,
            timesteps=scheduler.timesteps,
            extra=self._extra(generators),
            steps=request.num_inference_steps,
        )

    def denoise(
        self, latents: Tensor, timesteps: Tensor, rows: Rows, size: tuple[int, int]
    ) -> Tensor:
        """See `Pipeline.denoise`."""
        raise NotImplementedError

    def _encode(self, texts: list[str]) -> Rows:
        raise NotImplementedError

    def _own_rows(self, size: tuple[int, int], guidance: float, dtype: Any) -> Rows:
        """Give the conditioning of one row that is not text."""
        del size, guidance, dtype
        return {}

    def _latent_shape(self, size: tuple[int, int]) -> tuple[int, int, int]:
        raise NotImplementedError

    def _schedule(self, scheduler: Any, steps: int, shape: tuple[int, ...]) -> None:
        del shape
        scheduler.set_timesteps(steps, device=self.device)

    def _first(self, noise: Tensor, scheduler: Any) -> Tensor:
        del scheduler
        return noise

    def _extra(self, generators: list[torch.Generator]) -> dict[str, Any]:
        del generators
        return {}

    def _shift(self, scheduler: Any, tokens: int) -> float:
        config = scheduler.config
        shift: float = calculate_shift(
            tokens,
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", self.max_shift),
        )
        return shift

    def _unscaled(self, latents: Tensor) -> Tensor:
        config = self.pipe.vae.config
        return (latents / config.scaling_factor) + config.shift_factor

    def decode(self, latents: Tensor, size: tuple[int, int]) -> list[Image]:
        """See `Pipeline.decode`."""
        del size
        image = self.pipe.vae.decode(self._unscaled(latents), return_dict=False)[0]
        images: list[Image] = self.pipe.image_processor.postprocess(image, output_type="pil")
        return images


class StableDiffusion3(Family):
    """SD3 and the bundled model."""

    max_shift = 1.16

    def _encode(self, texts: list[str]) -> Rows:
        prompt, _, pooled, _ = self.pipe.encode_prompt(
            prompt=texts,
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            max_sequence_length=self._length,
        )
        return {"prompt": prompt, "pooled": pooled}

    def _latent_shape(self, size: tuple[int, int]) -> tuple[int, int, int]:
        factor = self.pipe.vae_scale_factor
        return self.pipe.transformer.config.in_channels, size[1] // factor, size[0] // factor

    def _schedule(self, scheduler: Any, steps: int, shape: tuple[int, ...]) -> None:
        more = {}
        if scheduler.config.get("use_dynamic_shifting", None):
            patch = self.pipe.transformer.config.patch_size
            more["mu"] = self._shift(scheduler, (shape[2] // patch) * (shape[3] // patch))
        scheduler.set_timesteps(steps, device=self.device, **more)

    def denoise(
        self, latents: Tensor, timesteps: Tensor, rows: Rows, size: tuple[int, int]
    ) -> Tensor:
        """See `Pipeline.denoise`."""
        del size
        out: Tensor = self.pipe.transformer(
            hidden_states=latents,
            timestep=timesteps,
            encoder_hidden_states=rows["prompt"],
            pooled_projections=rows["pooled"],
            return_dict=False,
        )[0]
        return out


class Flux(Family):
    """Flux: packed latents, guidance as an input of the model, no second half."""

    def guides(self, guidance: float) -> bool:
        """Never: its guidance is distilled into the model."""
        del guidance
        return False

    def _encode(self, texts: list[str]) -> Rows:
        prompt, pooled, _ = self.pipe.encode_prompt(
            prompt=texts, prompt_2=None, max_sequence_length=self._length
        )
        return {"prompt": prompt, "pooled": pooled}

    def _own_rows(self, size: tuple[int, int], guidance: float, dtype: Any) -> Rows:
        del size, dtype
        if not self.pipe.transformer.config.guidance_embeds:
            return {}
        return {"guidance": torch.full([1], guidance, device=self.device, dtype=torch.float32)}

    def _latent_shape(self, size: tuple[int, int]) -> tuple[int, int, int]:
        factor = self.pipe.vae_scale_factor * 2
        channels = self.pipe.transformer.config.in_channels // 4
        return channels, 2 * (size[1] // factor), 2 * (size[0] // factor)

    def _schedule(self, scheduler: Any, steps: int, shape: tuple[int, ...]) -> None:
        more: dict[str, Any] = {}
        if scheduler.config.get("use_flow_sigmas", False):
            more["num_inference_steps"] = steps
        else:
            more["sigmas"] = np.linspace(1.0, 1 / steps, steps)
        mu = self._shift(scheduler, (shape[2] // 2) * (shape[3] // 2))
        scheduler.set_timesteps(device=self.device, mu=mu, **more)
        scheduler.set_begin_index(0)

    def _first(self, noise: Tensor, scheduler: Any) -> Tensor:
        del scheduler
        packed: Tensor = self.pipe._pack_latents(noise, *noise.shape)  # noqa: SLF001
        return packed

    def denoise(
        self, latents: Tensor, timesteps: Tensor, rows: Rows, size: tuple[int, int]
    ) -> Tensor:
        """See `Pipeline.denoise`."""
        _, height, width = self._latent_shape(size)
        text = rows["prompt"]
        ids = self.pipe._prepare_latent_image_ids(  # noqa: SLF001
            len(latents), height // 2, width // 2, self.device, text.dtype
        )
        out: Tensor = self.pipe.transformer(
            hidden_states=latents,
            timestep=timesteps.to(latents.dtype) / 1000,
            guidance=rows.get("guidance"),
            pooled_projections=rows["pooled"],
            encoder_hidden_states=text,
            txt_ids=torch.zeros(text.shape[1], 3, device=self.device, dtype=text.dtype),
            img_ids=ids,
            return_dict=False,
        )[0]
        return out

    def decode(self, latents: Tensor, size: tuple[int, int]) -> list[Image]:
        """See `Pipeline.decode`."""
        width, height = size
        factor = self.pipe.vae_scale_factor
        unpacked = self.pipe._unpack_latents(latents, height, width, factor)  # noqa: SLF001
        return super().decode(unpacked, size)
