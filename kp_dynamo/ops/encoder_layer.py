"""The formulas of torch's fused attention and encoder layer.

In evaluation mode on the CPU, `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` each call one operator that XLA
lacks. AOTAutograd decomposes it by these formulas; if a size varies, Dynamo traces them. They are those of the modules
(torch/nn/modules/transformer.py, activation.py). Shapes: B batch, S length, D width, H heads.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def native_multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int, qkv_weight: Tensor, qkv_bias: Tensor,
    proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`aten._native_multi_head_attention`: [B, S, D] -> [B, S, D], and the weights or an empty tensor."""
    weights_qkv, biases_qkv = qkv_weight.chunk(3), qkv_bias.chunk(3)
    projected = [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights_qkv, biases_qkv, strict=True)]
    q, k, v = (x.unflatten(-1, (num_head, -1)).transpose(1, 2) for x in projected)
    scores = (q / math.sqrt(embed_dim // num_head)) @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(_broadcast(mask.to(torch.bool), mask_type), -torch.inf)
    weights = scores.softmax(-1)
    result = F.linear((weights @ v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return result, result.new_empty(0)
    return result, weights.mean(1) if average_attn_weights else weights


def _broadcast(mask: Tensor, mask_type: int | None) -> Tensor:
    """The mask, broadcastable to [B, H, S, S]: type 0 is [S, S], type 1 masks keys [B, S], type 2 is the full shape."""
    return mask[:, None, None, :] if mask_type == 1 else mask


def transformer_encoder_layer(
    src: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor,
    proj_bias: Tensor, use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Tensor, norm_bias_1: Tensor,
    norm_weight_2: Tensor, norm_bias_2: Tensor, ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor,
    ffn_bias_2: Tensor, mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    """`aten._transformer_encoder_layer_fwd`: [B, S, D] -> [B, S, D]."""
    shape = (embed_dim,)

    def attend(x: Tensor) -> Tensor:
        attention = native_multi_head_attention(
            x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask,
            need_weights=False, mask_type=mask_type,
        )  # fmt: skip
        return attention[0]

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, shape, norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, shape, norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attend(norm_1(src))
        return x + feed_forward(norm_2(x))
    x = norm_1(src + attend(src))
    return norm_2(x + feed_forward(x))
