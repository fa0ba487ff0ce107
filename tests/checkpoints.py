"""Tiny checkpoints with random weights, in ordinary diffusers format, built from config classes.

Each builder writes a folder that `DiffusionPipeline.from_pretrained` loads, in about a second,
with a few hundred kilobytes of weights. Weights depend on the seed alone.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from text_parts import HIDDEN, clip, clip_tokenizer, qwen, qwen_tokenizer, t5

if TYPE_CHECKING:
    from pathlib import Path


def sd3(path: Path, *, seed: int = 0) -> Path:
    """Stable Diffusion 3: batched CFG, flow matching, 32 x 32 pixels, multiples of 8."""
    import torch
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    torch.manual_seed(seed)
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=2 * HIDDEN,
        caption_projection_dim=16,
        pooled_projection_dim=2 * HIDDEN,
        pos_embed_max_size=16,
    )
    tokenizer = clip_tokenizer(path)
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_vae(channels=(8, 16, 16), latent_channels=4),
        text_encoder=clip(projection=True),
        tokenizer=tokenizer,
        text_encoder_2=clip(projection=True),
        tokenizer_2=tokenizer,
        text_encoder_3=t5(2 * HIDDEN),
        tokenizer_3=tokenizer,
    )
    return _save(pipe, path, {"max_sequence_length": 16})


def sd15(path: Path, *, seed: int = 0) -> Path:
    """Stable Diffusion 1.5: a UNet with batched CFG and a multistep scheduler, 32 x 32 pixels."""
    import torch
    from diffusers import PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    torch.manual_seed(seed)
    pipe = StableDiffusionPipeline(
        unet=UNet2DConditionModel(
            sample_size=16,
            in_channels=4,
            out_channels=4,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            cross_attention_dim=HIDDEN,
            attention_head_dim=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        ),
        scheduler=PNDMScheduler(skip_prk_steps=True, steps_offset=1),
        vae=_vae(channels=(8, 16), latent_channels=4),
        text_encoder=clip(projection=False),
        tokenizer=clip_tokenizer(path),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    return _save(pipe, path)


def sdxl(path: Path, *, seed: int = 0) -> Path:
    """Stable Diffusion XL: two text encoders, the size as conditioning, 32 x 32 pixels."""
    import torch
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

    torch.manual_seed(seed)
    tokenizer = clip_tokenizer(path)
    pipe = StableDiffusionXLPipeline(
        unet=UNet2DConditionModel(
            sample_size=16,
            in_channels=4,
            out_channels=4,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            cross_attention_dim=2 * HIDDEN,
            attention_head_dim=(2, 4),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=HIDDEN + 6 * 8,
            transformer_layers_per_block=(1, 1),
        ),
        scheduler=EulerDiscreteScheduler(steps_offset=1, timestep_spacing="leading"),
        vae=_vae(channels=(8, 16), latent_channels=4),
        text_encoder=clip(projection=False),
        tokenizer=tokenizer,
        text_encoder_2=clip(projection=True),
        tokenizer_2=tokenizer,
        force_zeros_for_empty_prompt=True,
    )
    return _save(pipe, path)


def pixart(path: Path, *, seed: int = 0) -> Path:
    """PixArt: a DiT under T5 with batched CFG and DPM-Solver; 256 x 256, the smallest it bins."""
    import torch
    from diffusers import DPMSolverMultistepScheduler, PixArtSigmaPipeline, PixArtTransformer2DModel

    torch.manual_seed(seed)
    pipe = PixArtSigmaPipeline(
        tokenizer=clip_tokenizer(path),
        text_encoder=t5(HIDDEN),
        vae=_vae(channels=(4, 4, 4, 4), latent_channels=4),
        transformer=PixArtTransformer2DModel(
            sample_size=32,
            patch_size=2,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            cross_attention_dim=16,
            caption_channels=HIDDEN,
            use_additional_conditions=False,
        ),
        scheduler=DPMSolverMultistepScheduler(),
    )
    return _save(pipe, path, {"max_sequence_length": 16})


def qwen_image(path: Path, *, seed: int = 0) -> Path:
    """Qwen-Image: a language model reads the prompt, guidance is two calls; 32 x 32 pixels."""
    import torch
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    torch.manual_seed(seed)
    pipe = QwenImagePipeline(
        transformer=QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=HIDDEN,
            axes_dims_rope=(8, 4, 4),
        ),
        vae=AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 2, 4],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=qwen(),
        tokenizer=qwen_tokenizer(path),
    )
    return _save(pipe, path, {"width": 32, "height": 32, "max_sequence_length": 32})


def flux(path: Path, *, seed: int = 0) -> Path:
    """Flux with guidance embedded: one forward pass a step, no batched CFG; 32 x 32 pixels."""
    import torch
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        FluxPipeline,
        FluxTransformer2DModel,
    )

    torch.manual_seed(seed)
    tokenizer = clip_tokenizer(path)
    pipe = FluxPipeline(
        transformer=FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=HIDDEN,
            pooled_projection_dim=HIDDEN,
            axes_dims_rope=(2, 2, 4),
            guidance_embeds=True,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_vae(channels=(8, 16, 16), latent_channels=4),
        text_encoder=clip(projection=False),
        tokenizer=tokenizer,
        text_encoder_2=t5(HIDDEN),
        tokenizer_2=tokenizer,
    )
    defaults = {"width": 32, "height": 32, "max_sequence_length": 16}
    return _save(pipe, path, defaults)


def _save(pipe: Any, path: Path, defaults: dict[str, object] | None = None) -> Path:
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(path)
    if defaults:
        (path / "stopbath.json").write_text(json.dumps(defaults))
    return path


def _vae(*, channels: tuple[int, ...], latent_channels: int) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        latent_channels=latent_channels,
        layers_per_block=1,
        norm_num_groups=4,
        sample_size=32,
        shift_factor=0.0,
        scaling_factor=1.0,
    )
