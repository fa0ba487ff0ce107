"""The finished parts as an ordinary diffusers folder."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Final

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

from training.text import silent_t5
from training.vocabulary import t5_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from diffusers import AutoencoderKL
    from transformers import CLIPTokenizer

    from training.denoiser import Generator


SERVED: Final = {
    "max_width": 32,
    "max_height": 32,
    "num_inference_steps": 12,
    "guidance_scale": 3.0,
    "max_sequence_length": 16,
}
"""What `stopbath serve` takes for granted; diffusers' own defaults are those of a large model."""


def export(
    generator: Generator, vae: AutoencoderKL, tokenizer: CLIPTokenizer, seed: int, out: Path
) -> None:
    """Write the pipeline to ``out``, replacing the parts of an older one.

    Denoiser and autoencoder are float16 on disk. The text encoders stay float32: they would be
    loaded as float16 while diffusers loads its own parts as float32.
    """
    torch.manual_seed(seed)
    t5_words = t5_tokenizer()
    pipeline = StableDiffusion3Pipeline(
        transformer=generator.transformer.half(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae.half(),
        text_encoder=generator.text.clip,
        tokenizer=tokenizer,
        text_encoder_2=generator.text.clip_2,
        tokenizer_2=tokenizer,
        text_encoder_3=silent_t5(len(t5_words)),
        tokenizer_3=t5_words,
    )
    for name in pipeline.components:
        shutil.rmtree(out / name, ignore_errors=True)
    pipeline.save_pretrained(out, safe_serialization=True)
    for name in ("tokenizer", "tokenizer_2"):
        _write_classic(tokenizer, out / name)
    (out / "stopbath.json").write_text(json.dumps(SERVED) + "\n")


def _write_classic(tokenizer: CLIPTokenizer, folder: Path) -> None:
    """Add the two files that readers before transformers 5 load a CLIP tokenizer from."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    merges = "".join(f"{left} {right}\n" for left, right in model["merges"])
    (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False) + "\n")
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}")


def size_bytes(folder: Path) -> int:
    """Bytes of all files below ``folder``."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
