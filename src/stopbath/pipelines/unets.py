"""The UNet families of step mode: Stable Diffusion 1, 2 and XL. See `families`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stopbath.pipelines.base import ModelUnusable
from stopbath.pipelines.families import Family

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor

    from stopbath.pipelines.base import Rows

__all__ = ["StableDiffusion", "StableDiffusionXL"]


class StableDiffusion(Family):
    """SD 1 and 2: a UNet, any scheduler."""

    def __init__(self, pipe: Any, max_sequence_length: int | None) -> None:
        super().__init__(pipe, max_sequence_length)
        if pipe.unet.config.time_cond_proj_dim is not None:
            raise ModelUnusable(
                f"this {type(pipe).__name__} takes guidance as an input of its UNet (LCM), which "
                "step mode does not know; serve it with --mode request"
            )

    def _encode(self, texts: list[str]) -> Rows:
        prompt, _ = self.pipe.encode_prompt(texts, self.device, 1, False)
        return {"prompt": prompt}

    def _latent_shape(self, size: tuple[int, int]) -> tuple[int, int, int]:
        factor = self.pipe.vae_scale_factor
        return self.pipe.unet.config.in_channels, size[1] // factor, size[0] // factor

    def _first(self, noise: Tensor, scheduler: Any) -> Tensor:
        return noise * scheduler.init_noise_sigma

    def _extra(self, generators: list[torch.Generator]) -> dict[str, Any]:
        extra: dict[str, Any] = self.pipe.prepare_extra_step_kwargs(generators, 0.0)
        return extra

    def denoise(
        self, latents: Tensor, timesteps: Tensor, rows: Rows, size: tuple[int, int]
    ) -> Tensor:
        """See `Pipeline.denoise`."""
        del size
        out: Tensor = self.pipe.unet(
            latents,
            timesteps,
            encoder_hidden_states=rows["prompt"],
            added_cond_kwargs={n: t for n, t in rows.items() if n != "prompt"} or None,
            return_dict=False,
        )[0]
        return out

    def decode(self, latents: Tensor, size: tuple[int, int]) -> list[Image]:
        """See `Pipeline.decode`."""
        del size
        pipe = self.pipe
        image = pipe.vae.decode(latents / pipe.vae.config.scaling_factor, return_dict=False)[0]
        image, unsafe = pipe.run_safety_checker(image, self.device, latents.dtype)
        keep = [True] * len(image) if unsafe is None else [not flag for flag in unsafe]
        images: list[Image] = pipe.image_processor.postprocess(
            image, output_type="pil", do_denormalize=keep
        )
        return images


class StableDiffusionXL(StableDiffusion):
    """SDXL: two text encoders, the size as conditioning."""

    def __init__(self, pipe: Any, max_sequence_length: int | None) -> None:
        super().__init__(pipe, max_sequence_length)
        if pipe.config.force_zeros_for_empty_prompt:
            self.no_negative = None

    def _encode(self, texts: list[str]) -> Rows:
        prompt, _, pooled, _ = self.pipe.encode_prompt(
            prompt=texts, device=self.device, do_classifier_free_guidance=False
        )
        return {"prompt": prompt, "text_embeds": pooled}

    def _own_rows(self, size: tuple[int, int], guidance: float, dtype: Any) -> Rows:
        del guidance
        width, height = size
        second = self.pipe.text_encoder_2
        times = self.pipe._get_add_time_ids(  # noqa: SLF001
            (height, width),
            (0, 0),
            (height, width),
            dtype=dtype,
            text_encoder_projection_dim=second.config.projection_dim,
        )
        return {"time_ids": times.to(self.device)}

    def _schedule(self, scheduler: Any, steps: int, shape: tuple[int, ...]) -> None:
        super()._schedule(scheduler, steps, shape)
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(0)

    def decode(self, latents: Tensor, size: tuple[int, int]) -> list[Image]:
        """See `Pipeline.decode`."""
        del size
        pipe, config = self.pipe, self.pipe.vae.config
        latents = latents / config.scaling_factor
        if config.get("latents_mean") is not None and config.get("latents_std") is not None:
            mean, std = (
                latents.new_tensor(values).view(1, -1, 1, 1)
                for values in (config.latents_mean, config.latents_std)
            )
            latents = latents * std + mean
        image = pipe.vae.decode(latents, return_dict=False)[0]
        if pipe.watermark is not None:
            image = pipe.watermark.apply_watermark(image)
        images: list[Image] = pipe.image_processor.postprocess(image, output_type="pil")
        return images
