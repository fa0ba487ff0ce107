"""SD3's joint attention in which the last token stands for many equal ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from diffusers.models.attention_processor import Attention


class CountedLastToken:
    """Attention processor that counts the last text token ``last_token_count`` times.

    The tokens of the silent T5 are all zero and have no position, so they stay equal through
    every layer: N of them attend and are attended to like one whose logit is raised by log N.
    Training with one token and a random N makes the model indifferent to
    ``max_sequence_length`` at a fraction of the cost of 256 tokens.
    """

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,  # noqa: ARG002 - part of the processor protocol
        *,
        last_token_count: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Attend over (batch, image, width) and (batch, text, width); both are updated."""
        image = hidden_states.shape[1]
        image_qkv = (attn.to_q, attn.to_k, attn.to_v)
        text_qkv = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        query, key, value = (_heads(project(hidden_states), attn.heads) for project in image_qkv)
        text_query, text_key, text_value = (
            _heads(project(encoder_hidden_states), attn.heads) for project in text_qkv
        )
        query = torch.cat([attn.norm_q(query), attn.norm_added_q(text_query)], dim=2)
        key = torch.cat([attn.norm_k(key), attn.norm_added_k(text_key)], dim=2)
        value = torch.cat([value, text_value], dim=2)
        bias = functional.pad(last_token_count.log()[:, None, None, None], (key.shape[2] - 1, 0))
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        attended = attended.transpose(1, 2).flatten(2)
        text = attended[:, image:]
        if not attn.context_pre_only:
            text = attn.to_add_out(text)
        return attn.to_out[0](attended[:, :image]), text


def _heads(tokens: Tensor, heads: int) -> Tensor:
    """(batch, tokens, width) to (batch, heads, tokens, width / heads)."""
    return tokens.unflatten(2, (heads, -1)).transpose(1, 2)
