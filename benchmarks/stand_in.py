"""The bundled model, or a random one of its shape while there is none."""

from __future__ import annotations

import json
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import stopbath
from stopbath.config import BUNDLED

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["HOME", "model"]

HOME = Path(stopbath.__file__).parent / "pipelines" / "bundled"


@contextmanager
def model() -> Iterator[str]:
    """Give what `--model` takes; says so when it is the random one."""
    if (HOME / "model_index.json").is_file():
        yield BUNDLED
        return
    print("# the bundled model is not there: a random one of its shape")
    with tempfile.TemporaryDirectory() as folder:
        _build(Path(folder) / "model")
        yield str(Path(folder) / "model")


def _build(path: Path) -> None:
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import (
        CLIPTextConfig,
        CLIPTextModelWithProjection,
        CLIPTokenizer,
        T5Config,
        T5EncoderModel,
    )

    path.mkdir(parents=True)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["<|startoftext|>", "<|endoftext|>", "!", *letters, *(f"{x}</w>" for x in letters)]
    (path / "words.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(
        vocab=str(path / "words.json"),
        merges=str(path / "merges.txt"),
        model_max_length=16,
        unk_token="!",  # noqa: S106  (a token of text)
    )

    def clip(width: int, layers: int) -> CLIPTextModelWithProjection:
        return CLIPTextModelWithProjection(
            CLIPTextConfig(
                vocab_size=len(words),
                hidden_size=width,
                intermediate_size=4 * width,
                num_hidden_layers=layers,
                num_attention_heads=4,
                max_position_embeddings=16,
                projection_dim=width,
                bos_token_id=0,
                eos_token_id=1,
                pad_token_id=1,
            )
        )

    channels = (16, 32, 32)
    StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=8,
            out_channels=8,
            num_layers=3,
            attention_head_dim=24,
            num_attention_heads=4,
            joint_attention_dim=64,
            caption_projection_dim=96,
            pooled_projection_dim=64,
            pos_embed_max_size=64,
            qk_norm="rms_norm",
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKL(
            block_out_channels=channels,
            down_block_types=("DownEncoderBlock2D",) * len(channels),
            up_block_types=("UpDecoderBlock2D",) * len(channels),
            latent_channels=8,
            layers_per_block=1,
            norm_num_groups=8,
            sample_size=32,
            shift_factor=0.0,
            scaling_factor=1.0,
            mid_block_add_attention=False,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        text_encoder=clip(48, 2),
        tokenizer=tokenizer,
        text_encoder_2=clip(16, 1),
        tokenizer_2=tokenizer,
        text_encoder_3=T5EncoderModel(
            T5Config(vocab_size=len(words), d_model=64, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
        ),
        tokenizer_3=tokenizer,
    ).save_pretrained(path)
    defaults = {"num_inference_steps": 12, "guidance_scale": 3.0, "max_sequence_length": 16}
    (path / "stopbath.json").write_text(json.dumps(defaults))
