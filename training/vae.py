"""The autoencoder: 32x32 RGB pictures to 8x8 latents of 8 channels and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn
from torch.nn import functional

from training.colours import RGB, pairs_rgb
from training.data import PICTURE_PX, Digits, paint
from training.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from training.checkpoint import Checkpoint
    from training.recipe import VaePhase

FACTOR: Final = 4
LATENT_CHANNELS: Final = 8
LATENT_PX: Final = PICTURE_PX // FACTOR
L1_SHARE: Final = 0.5
KL_SHARE: Final = 1e-4
"""Per latent number. Weighted per picture instead, the latents turn to noise."""
QUIET_LOG_VARIANCE: Final = -6.0
CLIP_NORM: Final = 1.0
CHECKPOINT_EVERY: Final = 500


def build() -> AutoencoderKL:
    """Make an untrained autoencoder; its latents start with little noise.

    One normalization group: with more of them the encoder loses the absolute colours.
    """
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=1,
        sample_size=PICTURE_PX,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=0.0,
        force_upcast=False,
    )
    nn.init.constant_(vae.encoder.conv_out.bias[LATENT_CHANNELS:], QUIET_LOG_VARIANCE)
    return vae


def train(
    digits: Digits, phases: Sequence[VaePhase], seed: int, checkpoint: Checkpoint
) -> AutoencoderKL:
    """Train on painted digits through all phases, then set the latents' shift and scale."""
    torch.manual_seed(seed)
    chance = torch.Generator().manual_seed(seed)
    vae = build()
    for number, phase in enumerate(phases, start=1):
        optimizer = torch.optim.AdamW(vae.parameters(), lr=phase.learning_rate)
        schedule = phase.schedule(optimizer)
        parts = {"vae": vae, "optimizer": optimizer, "schedule": schedule}
        progress = Progress(f"autoencoder {number}", phase.iterations)
        stage = f"vae-{number}"
        for iteration in range(checkpoint.resume(stage, parts, chance), phase.iterations):
            loss, squared = _loss(vae, painted(digits, phase, phase.batch, chance), chance)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(vae.parameters(), CLIP_NORM)
            optimizer.step()
            schedule.step()
            done = iteration + 1
            progress.step(done, f"psnr {_psnr(squared):.1f} dB")
            if done % CHECKPOINT_EVERY == 0 or done == phase.iterations:
                checkpoint.save(stage, parts, chance, done)
    vae.eval().requires_grad_(requires_grad=False)
    _standardize(vae, painted(digits, phases[-1], 1024, chance))
    return vae


def _loss(vae: AutoencoderKL, painted: Tensor, chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """Loss and squared error of decoding (batch, 3, 32, 32) pictures in 0..1."""
    pictures = 2 * painted - 1
    posterior = vae.encode(pictures).latent_dist
    noise = torch.randn(posterior.mean.shape, generator=chance)
    decoded = vae.decode(posterior.mean + posterior.std * noise).sample
    l2 = functional.mse_loss(decoded, pictures)
    l1 = functional.l1_loss(decoded, pictures)
    kl = posterior.kl().mean() / posterior.mean[0].numel()
    return l2 + L1_SHARE * l1 + KL_SHARE * kl, l2


def painted(digits: Digits, phase: VaePhase, count: int, chance: torch.Generator) -> Tensor:
    """Draw (count, 3, 32, 32) pictures in 0..1, each a random digit in two random colours."""
    chosen = torch.randint(len(digits.images), (count,), generator=chance)
    if phase.legible:
        foregrounds, backgrounds = pairs_rgb()
        pairs = torch.randint(len(foregrounds), (count,), generator=chance)
        named = torch.stack([foregrounds[pairs], backgrounds[pairs]])
    else:
        named = RGB[torch.randint(len(RGB), (2, count), generator=chance)]
    free = torch.rand((2, count, 3), generator=chance)
    use_free = torch.rand((1, count, 1), generator=chance) >= 1 - phase.free_share
    foreground, background = torch.where(use_free, free, named)
    return paint(digits.images[chosen], foreground, background)


def encode(vae: AutoencoderKL, pictures: Tensor) -> Tensor:
    """Map (batch, 3, 32, 32) pictures in 0..1 to standardized (batch, 8, 8, 8) latents."""
    with torch.no_grad():
        latents = vae.encode(2 * pictures - 1).latent_dist.mean
    return torch.as_tensor((latents - vae.config.shift_factor) * vae.config.scaling_factor)


def _standardize(vae: AutoencoderKL, pictures: Tensor) -> None:
    with torch.no_grad():
        latents = vae.encode(2 * pictures - 1).latent_dist.mean
    vae.register_to_config(
        shift_factor=round(float(latents.mean()), 4),
        scaling_factor=round(1 / float(latents.std()), 4),
    )


def _psnr(squared_error: Tensor) -> float:
    """Peak signal-to-noise ratio in dB of a mean squared error over values in -1..1."""
    return 10 * float(torch.log10(4 / squared_error.detach().clamp_min(1e-8)))
