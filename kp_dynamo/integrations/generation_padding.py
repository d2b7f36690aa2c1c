"""Pad the inputs of a forward so that few programs serve all prompts.

A prompt is padded on the right, to a bucket. Its padding writes junk after the true length to the cache. No token
attends to it: the masks hide the rows after a token, and decoding overwrites a row before it is visible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _zeros(value: Tensor, extra: int) -> Tensor:
    return F.pad(value, (0, extra))


def _last_column(value: Tensor, extra: int) -> Tensor:
    """Repeats the last column: a longest position, and so a table or a rule chosen by it, stays the true one."""
    return torch.cat([value, value[..., -1:].expand(*value.shape[:-1], extra)], dim=-1)


def _count_on(value: Tensor, extra: int) -> Tensor:
    return torch.arange(int(value[0]), int(value[0]) + len(value) + extra, device="cpu")


def _last_row(value: Any, extra: int) -> Any:
    """Masks [B, 1, S, L], or one for each kind of layer. A row that hides every key would make NaN."""
    if isinstance(value, dict):
        return {kind: _last_row(mask, extra) for kind, mask in value.items()}
    if not isinstance(value, Tensor) or value.ndim != 4:
        return value
    return torch.cat([value, value[..., -1:, :].expand(-1, -1, extra, -1)], dim=-2)


_PAD: dict[str, Callable[[Any, int], Any]] = {
    "input_ids": _zeros,
    "decoder_input_ids": _zeros,
    "cache_position": _count_on,
    "position_ids": _last_column,
    "decoder_position_ids": _last_column,
    "token_type_ids": _last_column,
    "attention_mask": _last_row,
    "decoder_attention_mask": _last_row,
}


def pad_prompt(inputs: dict[str, Any], extra: int) -> dict[str, Any]:
    """The inputs of a forward with `extra` more tokens."""
    if extra == 0:
        return inputs
    return {name: _PAD[name](value, extra) if name in _PAD else value for name, value in inputs.items()}


def pad_columns(mask: Tensor, length: int) -> Tensor:
    """A mask [B, S] as [B, length]; the new columns are hidden."""
    return F.pad(mask, (0, length - mask.shape[1]))


def pad_encoded(hidden: Tensor, length: int) -> Tensor:
    """Hidden states [B, S, E] of an encoder as [B, length, E]; the mask of the encoder hides the new rows."""
    return F.pad(hidden, (0, 0, 0, length - hidden.shape[1]))
