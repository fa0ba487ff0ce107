"""The text side: two small CLIP encoders that learn, and a T5 that is silent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from training.vocabulary import TEXT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import CLIPTokenizer

WIDTHS: Final = (48, 16)
LAYERS: Final = (2, 1)
TOKEN_SPREAD: Final = 0.3
JOINT: Final = sum(WIDTHS)
"""Width of text embeddings, per token and pooled: the two encoders side by side."""


class TextEncoders(nn.Module):  # type: ignore[misc] # mypy does not follow torch
    """Both CLIP encoders, read as `StableDiffusion3Pipeline` reads them."""

    def __init__(self, tokenizer: CLIPTokenizer) -> None:
        """Make untrained encoders for the tokens of ``tokenizer``."""
        super().__init__()
        self.clip, self.clip_2 = (
            _clip(len(tokenizer), int(tokenizer.bos_token_id), int(tokenizer.eos_token_id), *shape)
            for shape in zip(WIDTHS, LAYERS, strict=True)
        )

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Embed (batch, tokens) ids: (batch, tokens, `JOINT`) and pooled (batch, `JOINT`)."""
        outputs = [encoder(ids, output_hidden_states=True) for encoder in (self.clip, self.clip_2)]
        # The last layer only feeds the pooled vector: SD3 takes the tokens one layer earlier.
        per_token = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        pooled = torch.cat([output.text_embeds for output in outputs], dim=-1)
        return per_token, pooled


class Reader(nn.Module):  # type: ignore[misc] # mypy does not follow torch
    """Linear readers of the pooled text: they teach the encoders and are thrown away."""

    def __init__(self) -> None:
        """Make readers of the digit, the digit's colour and the background's."""
        super().__init__()
        self.readers = nn.ModuleList([nn.Linear(JOINT, 10) for _ in range(3)])

    def loss(self, pooled: Tensor, scenes: Tensor) -> Tensor:
        """Cross-entropy of reading (batch, 3) scene indices from (batch, `JOINT`) pooled text.

        A scene of -100 is one that the text does not tell.
        """
        losses = [
            functional.cross_entropy(reader(pooled), scenes[:, i])
            for i, reader in enumerate(self.readers)
        ]
        return torch.stack(losses).sum()


def _clip(
    vocabulary: int, begin: int, end: int, width: int, layers: int
) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 16 if width > 16 else 2,
        max_position_embeddings=TEXT_TOKENS,
        hidden_act="quick_gelu",
        bos_token_id=begin,
        eos_token_id=end,
        pad_token_id=end,
    )
    encoder = CLIPTextModelWithProjection(config)
    # SD3 reads the tokens before any normalization: at CLIP's own 0.02 they would be mute at first.
    nn.init.normal_(encoder.get_input_embeddings().weight, std=TOKEN_SPREAD)
    return encoder


def silent_t5(vocabulary: int) -> T5EncoderModel:
    """T5 encoder whose output is exactly zero.

    A pipeline saved with ``text_encoder_3: null`` does not load back in every engine, and a T5
    that speaks would cost more than the whole denoiser.
    """
    config = T5Config(
        vocab_size=vocabulary,
        d_model=JOINT,
        d_kv=16,
        d_ff=32,
        num_layers=1,
        num_heads=1,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        is_encoder_decoder=False,
        use_cache=False,
    )
    encoder = T5EncoderModel(config)
    with torch.no_grad():
        encoder.encoder.final_layer_norm.weight.zero_()
    return encoder


def tokenize(tokenizer: CLIPTokenizer, texts: Sequence[str], tokens: int = TEXT_TOKENS) -> Tensor:
    """Ids of ``texts``, padded and cut to ``tokens``: (len(texts), tokens)."""
    ids = tokenizer(
        list(texts), padding="max_length", max_length=tokens, truncation=True, return_tensors="pt"
    ).input_ids
    return torch.as_tensor(ids)
