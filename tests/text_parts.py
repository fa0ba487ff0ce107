"""What reads the prompts of the tiny checkpoints: tokenizers and text encoders."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN = 16
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = [
    "<|startoftext|>",
    "<|endoftext|>",
    "!",
    *LETTERS,
    *(f"{letter}</w>" for letter in LETTERS),
]


def clip(*, projection: bool) -> Any:
    """Make a CLIP text encoder with random weights."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(WORDS),
        hidden_size=HIDDEN,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        projection_dim=HIDDEN,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config).eval()


def t5(width: int) -> Any:
    """Make a T5 encoder with random weights."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(vocab_size=len(WORDS), d_model=width, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    ).eval()


def clip_tokenizer(path: Path) -> Any:
    """Make a CLIP tokenizer that knows letters and joins none of them."""
    from transformers import CLIPTokenizer

    path.mkdir(parents=True, exist_ok=True)
    vocabulary, merges = path / "words.json", path / "merges.txt"
    vocabulary.write_text(json.dumps({word: i for i, word in enumerate(WORDS)}))
    merges.write_text("#version: 0.2\n")
    special = {"unk_token": "!"}
    return CLIPTokenizer(vocab=str(vocabulary), merges=str(merges), model_max_length=16, **special)


def qwen() -> Any:
    """Make the language model that reads prompts for Qwen-Image."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "vocab_size": 512,
        "hidden_size": HIDDEN,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [1, 1, 2],
        },
    }
    vision = {
        "depth": 1,
        "hidden_size": HIDDEN,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
    }
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    ).eval()


def qwen_tokenizer(path: Path) -> Any:
    """Make a byte-level tokenizer without merges: it reads any text, a token a byte."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    path.mkdir(parents=True, exist_ok=True)
    vocabulary = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    vocabulary["<|endoftext|>"] = len(vocabulary)
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], model_max_length=1024)
