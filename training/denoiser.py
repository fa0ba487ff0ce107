"""The denoiser: a three-layer SD3 transformer that learns together with the text encoders."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final

import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.embeddings import get_2d_sincos_pos_embed
from torch import Tensor, nn
from torch.nn import functional

from training import vae as autoencoder
from training.attention import CountedLastToken
from training.captions import CaptionWriter
from training.colours import NAMES, RGB, contrast
from training.data import Digits, paint
from training.progress import Progress
from training.text import JOINT, Reader, TextEncoders, tokenize
from training.vocabulary import TEXT_TOKENS

if TYPE_CHECKING:
    from diffusers import AutoencoderKL
    from transformers import CLIPTokenizer

    from training.checkpoint import Checkpoint
    from training.recipe import DenoiserPhase, Recipe

HEADS: Final = 4
HEAD_WIDTH: Final = 24
LAYERS: Final = 3
PATCH: Final = 2
POSITIONS: Final = 64
"""Patches per side that have a position: enough for an engine that warms up at 512x512 pixels."""

T5_TOKENS: Final = 300
EMA_DECAY: Final = 0.999
SIGMA_SPREAD: Final = 1.1
WEIGHT_OVER_CONTRAST: Final = 1.2
WEIGHTS: Final = (0.5, 2.0)
CLIP_NORM: Final = 1.0
TEACHING_SHARE: Final = 0.1
UNTOLD: Final = -100
"""What torch's cross-entropy leaves out: an empty caption tells nothing."""
CHECKPOINT_EVERY: Final = 500
TERSE_MULTIPLE: Final = 4


def build() -> SD3Transformer2DModel:
    """Make an untrained transformer; its output starts at zero."""
    transformer = SD3Transformer2DModel(
        sample_size=autoencoder.LATENT_PX,
        patch_size=PATCH,
        in_channels=autoencoder.LATENT_CHANNELS,
        out_channels=autoencoder.LATENT_CHANNELS,
        num_layers=LAYERS,
        attention_head_dim=HEAD_WIDTH,
        num_attention_heads=HEADS,
        joint_attention_dim=JOINT,
        caption_projection_dim=HEADS * HEAD_WIDTH,
        pooled_projection_dim=JOINT,
        pos_embed_max_size=POSITIONS,
        qk_norm="rms_norm",
    )
    modulations = [transformer.norm_out.linear, transformer.proj_out]
    for block in transformer.transformer_blocks:
        modulations += [block.norm1.linear, block.norm1_context.linear]
    for linear in modulations:
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    # The configuration's own table spreads 4 patches over 64 positions, a 16th of a radian apart:
    # hardly to be told from each other. Every engine loads the table with the weights.
    table = get_2d_sincos_pos_embed(
        HEADS * HEAD_WIDTH, POSITIONS, base_size=POSITIONS, output_type="pt"
    )
    transformer.pos_embed.pos_embed.copy_(table[None])
    return transformer


class Generator(nn.Module):  # type: ignore[misc] # mypy does not follow torch
    """What learns in this stage: the denoiser and its text encoders."""

    def __init__(self, tokenizer: CLIPTokenizer) -> None:
        """Make both, untrained."""
        super().__init__()
        self.text = TextEncoders(tokenizer)
        self.transformer = build()

    def forward(
        self, noisy: Tensor, sigma: Tensor, text: tuple[Tensor, Tensor], t5_tokens: Tensor
    ) -> Tensor:
        """Predict the velocity of (batch, 8, 8, 8) latents at noise level ``sigma`` (batch,).

        ``text`` is what the text encoders made of the captions, and ``t5_tokens`` (batch,) says
        how many zero tokens of the silent T5 to pretend.
        """
        per_token, pooled = text
        silence = per_token.new_zeros(len(per_token), 1, JOINT)
        return torch.as_tensor(
            self.transformer(
                hidden_states=noisy,
                encoder_hidden_states=torch.cat([per_token, silence], dim=1),
                pooled_projections=pooled,
                timestep=1000 * sigma,
                joint_attention_kwargs={"last_token_count": t5_tokens},
                return_dict=False,
            )[0]
        )


@dataclass(frozen=True)
class Pool:
    """Painted digits as latents, with what a caption about them must say."""

    latents: Tensor
    """(count, 8, 8, 8), standardized."""
    scenes: list[tuple[int, str, str]]
    """Digit, foreground, background."""
    answers: Tensor
    """(count, 3): the same as numbers."""
    weights: Tensor
    """(count,) loss weights from the colours' contrast."""


def paint_pool(
    digits: Digits, vae: AutoencoderKL, count: int, writer: CaptionWriter, chance: torch.Generator
) -> Pool:
    """Paint and encode ``count`` digits in legible colours."""
    order = torch.cat(
        [
            torch.randperm(len(digits.images), generator=chance)
            for _ in range(count // len(digits.images) + 1)
        ]
    )[:count]
    colours = [writer.colours() for _ in range(count)]
    foreground = RGB[[NAMES.index(name) for name, _ in colours]]
    background = RGB[[NAMES.index(name) for _, name in colours]]
    latents = torch.cat(
        [
            autoencoder.encode(vae, paint(digits.images[some], foreground[rows], background[rows]))
            for some, rows in zip(order.split(256), torch.arange(count).split(256), strict=True)
        ]
    )
    labels = digits.labels[order].tolist()
    scenes = [(label, *pair) for label, pair in zip(labels, colours, strict=True)]
    answers = [(label, NAMES.index(f), NAMES.index(b)) for label, f, b in scenes]
    weights = WEIGHT_OVER_CONTRAST / contrast(foreground, background)
    return Pool(latents, scenes, torch.tensor(answers), weights.clamp(*WEIGHTS))


def train(
    digits: Digits,
    vae: AutoencoderKL,
    tokenizer: CLIPTokenizer,
    *,
    recipe: Recipe,
    seed: int,
    checkpoint: Checkpoint,
) -> Generator:
    """Train on a painted pool through all phases; the averaged weights are the result."""
    torch.manual_seed(seed)
    chance = torch.Generator().manual_seed(seed)
    words = Random(seed)
    writer = CaptionWriter(words)
    pool = paint_pool(digits, vae, recipe.pool, writer, chance)
    generator = Generator(tokenizer)
    generator.transformer.set_attn_processor(CountedLastToken())
    averaged = Generator(tokenizer)
    averaged.load_state_dict(generator.state_dict())
    averaged.requires_grad_(requires_grad=False)
    for number, phase in enumerate(recipe.denoiser, start=1):
        session = _Session(generator, averaged, Reader(), tokenizer, pool, writer, chance)
        _run_phase(session, phase, number, checkpoint, words)
    averaged.eval()
    return averaged


@dataclass(frozen=True)
class _Session:
    generator: Generator
    averaged: Generator
    reader: Reader
    tokenizer: CLIPTokenizer
    pool: Pool
    writer: CaptionWriter
    chance: torch.Generator


def _run_phase(
    session: _Session, phase: DenoiserPhase, number: int, checkpoint: Checkpoint, words: Random
) -> None:
    parameters = list(session.generator.parameters())
    targets = list(session.averaged.parameters())
    learning = parameters + (list(session.reader.parameters()) if phase.taught else [])
    optimizer = torch.optim.AdamW(learning, lr=phase.learning_rate, weight_decay=1e-4)
    schedule = phase.schedule(optimizer)
    parts = {
        "reader": session.reader,
        "generator": session.generator,
        "averaged": session.averaged,
        "optimizer": optimizer,
        "schedule": schedule,
    }
    stage = f"denoiser-{number}"
    progress = Progress(f"denoiser {number}", phase.iterations)
    recent = 1.0
    for iteration in range(
        checkpoint.resume(stage, parts, session.chance, words), phase.iterations
    ):
        loss, figure = _loss(session, phase)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learning, CLIP_NORM)
        optimizer.step()
        schedule.step()
        done = iteration + 1
        # A short run would otherwise average mostly its own random start.
        decay = min(EMA_DECAY, done / (done + 10)) if number == 1 else EMA_DECAY
        with torch.no_grad():
            torch._foreach_lerp_(targets, parameters, 1 - decay)
        recent += 0.02 * (float(figure.detach()) - recent)
        progress.step(done, f"loss {recent:.3f}")
        if done % CHECKPOINT_EVERY == 0 or done == phase.iterations:
            checkpoint.save(stage, parts, session.chance, done, words)


def _loss(session: _Session, phase: DenoiserPhase) -> tuple[Tensor, Tensor]:
    """Loss of one batch, and the part of it that is about pictures."""
    chance, pool = session.chance, session.pool
    rows = torch.randint(len(pool.latents), (phase.batch,), generator=chance)
    terse = float(torch.rand((), generator=chance)) < phase.terse_share
    captions = [
        session.writer.caption(*pool.scenes[row], fillers=not terse, exacting=phase.exacting)
        for row in rows.tolist()
    ]
    ids = tokenize(session.tokenizer, captions)
    if terse:
        ids = _trimmed(ids, int(session.tokenizer.eos_token_id))
    clean = pool.latents[rows]
    noise = torch.randn(clean.shape, generator=chance)
    spread = SIGMA_SPREAD * torch.randn(phase.batch, generator=chance)
    sigma = torch.sigmoid(phase.sigma_shift + spread)
    # Log-uniform: the handful of an engine's shortest text to the 256 of the stock pipeline.
    t5_tokens = torch.exp(
        torch.rand(phase.batch, generator=chance) * torch.log(torch.tensor(T5_TOKENS))
    )
    noisy = torch.lerp(clean, noise, sigma[:, None, None, None])
    text = session.generator.text(ids)
    velocity = session.generator(noisy, sigma, text, t5_tokens)
    error = functional.mse_loss(velocity, noise - clean, reduction="none").mean((1, 2, 3))
    loss = (error * pool.weights[rows]).mean() if phase.weighted else error.mean()
    if not phase.taught:
        return loss, loss
    told = torch.tensor([caption != "" for caption in captions])
    answers = pool.answers[rows].where(told[:, None], torch.tensor(UNTOLD))
    return loss + TEACHING_SHARE * session.reader.loss(text[1], answers), loss


def _trimmed(ids: Tensor, end: int) -> Tensor:
    """Cut (batch, 32) ids behind the longest text: CLIP is causal, so what is left is unchanged."""
    longest = int((ids != end).sum(1).max()) + 1
    tokens = -(-longest // TERSE_MULTIPLE) * TERSE_MULTIPLE
    return ids[:, : min(TEXT_TOKENS, tokens)]
