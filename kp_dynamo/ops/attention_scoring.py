"""The scores of attention: scaled, capped, masked, and a block of queries at a time.

Shapes: N batch x heads, S queries, T keys, D and E widths of a head, G heads that share keys and values, M = N / G.
Heads that share keys are neighbours, and so are their rows: scores are [M, G * S, T].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kp_dynamo.ops.compute_dtype import compute_dtype

NUM_SCORING = 7  # of the operators' arguments in `Scoring.in_order`


@dataclass(frozen=True)
class Scoring:
    """How scores are computed from q @ k: scaled, capped, then masked.

    Attributes:
        masks: A boolean mask selects a score or its fill, any other is added; [B|1, H|1, S|1, T|1] or fewer.
        fills: Replacements for the scores where a mask is False; one number per mask.
        batch_dims: Sizes (B, H), whose product is N; four sizes in the order of the pass `divide_heads`, for masks of
            six dimensions; empty if no mask needs them.
        scale: Factor of q @ k.
        is_causal: Whether query i reads keys 0 to i.
        zero_rows: Whether a row without keys is 0; otherwise it is NaN.
        block: Queries that are computed at a time: their scores should fit into the chip's vector memory.
        soft_cap: The scaled scores become soft_cap * tanh(scores / soft_cap), as in Gemma 2; 0 for none.
        sinks: One more score for each row, [B|1, H|1, S|1, 1], of a key without a value, as in GPT-OSS; None for none.
    """

    masks: Sequence[Tensor]
    fills: Sequence[float]
    batch_dims: Sequence[int]
    scale: float
    is_causal: bool
    zero_rows: bool
    block: int
    soft_cap: float = 0.0
    sinks: Tensor | None = None

    @property
    def in_order(self) -> tuple[Any, ...]:
        """The first arguments as the operators take them; the soft cap and the sinks come after those of dropout."""
        return (
            self.masks, self.fills, self.batch_dims, self.scale, self.is_causal, self.zero_rows, self.block,
        )  # fmt: skip

    def blocks(self, num_queries: int, num_keys: int) -> Iterator[tuple[int, int, int]]:
        """(first query, end of queries, end of keys); causal queries read no later keys."""
        for first in range(0, num_queries, self.block):
            end = min(first + self.block, num_queries)
            yield first, end, min(end, num_keys) if self.is_causal else num_keys

    def scores(self, q: Tensor, k: Tensor, first: int) -> Tensor:
        """[N, s, D], [M, D, t] -> [M, G * s, t]: scores of the queries from `first` on with the first t keys."""
        sizes = q.shape[0] // k.shape[0], q.shape[1], k.shape[2]
        scores = self.capped(q, k)
        for mask, fill in zip(self.masks, self.fills, strict=True):
            part = self._flat(mask, first, sizes)
            scores = torch.where(part, scores, fill) if mask.dtype == torch.bool else scores + part.to(scores.dtype)
        if self.is_causal:
            queries = torch.arange(first, first + sizes[1], dtype=torch.int32, device=q.device)
            keys = torch.arange(sizes[2], dtype=torch.int32, device=q.device)
            scores = torch.where(_repeated(queries[:, None], sizes[0]) >= keys, scores, -torch.inf)
        return scores

    def sink_scores(self, q: Tensor, k: Tensor, first: int) -> Tensor | None:
        """The sinks of a block, broadcastable to [M, G * s, 1], or None."""
        if self.sinks is None:
            return None
        return self._flat(self.sinks, first, (q.shape[0] // k.shape[0], q.shape[1], 1)).to(compute_dtype(q.dtype))

    def capped(self, q: Tensor, k: Tensor) -> Tensor:
        """The scores of `scores` before they are masked."""
        scores = _scaled_matmul(with_heads_of(k, q), k, self.scale)
        return self.soft_cap * torch.tanh(scores / self.soft_cap) if self.soft_cap else scores

    def through_cap(self, d_scores: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """The gradient of a block's scaled scores, [M, t, G * s], from that of the capped ones."""
        if not self.soft_cap:
            return d_scores
        return d_scores * (1 - torch.square(self.capped(q, k).transpose(1, 2) / self.soft_cap))

    def without_masked(self, d_scores: Tensor, first: int, num_sharing: int) -> Tensor:
        """Gradients of a block's scores, [M, t, G * s], zero where a fill replaced the score."""
        sizes = num_sharing, d_scores.shape[2] // num_sharing, d_scores.shape[1]
        for mask in self.masks:
            if mask.dtype == torch.bool:
                d_scores = torch.where(self._flat(mask, first, sizes).transpose(-2, -1), d_scores, 0.0)
        return d_scores

    def _flat(self, mask: Tensor, first: int, sizes: tuple[int, int, int]) -> Tensor:
        """A block's slice of a mask that broadcasts to [M, G * s, t], for the sizes (G, s, t)."""
        num_sharing, rows, columns = sizes
        if mask.dim() > 1 and mask.shape[-2] != 1:
            mask = mask[..., first : first + rows, :]
        if mask.dim() > 0 and mask.shape[-1] != 1:
            mask = mask[..., :columns]
        if all(size == 1 for size in mask.shape[:-2]):
            mask = mask.reshape([1] * (2 - mask.dim()) + [*mask.shape[-2:]])
            return mask if mask.shape[0] == 1 else _repeated(mask, num_sharing)
        return mask.expand(*self.batch_dims, rows, columns).reshape(-1, num_sharing * rows, columns)


def with_heads_of(like: Tensor, x: Tensor) -> Tensor:
    """The rows of `x` for as many heads as `like` has: [N, s, d] -> [M, G * s, d], or back. Neighbours share keys."""
    return x if x.shape[0] == like.shape[0] else x.reshape(like.shape[0], -1, x.shape[2])


def _repeated(rows: Tensor, count: int) -> Tensor:
    """[s, t] -> [count * s, t]."""
    return rows if count == 1 else rows.expand(count, *rows.shape).reshape(-1, rows.shape[1])


def _scaled_matmul(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """q @ k times `scale`. If that is exact, the queries are scaled: by 1/8 for heads of 64.

    A v6e's compiler then fuses the scores into the matmul that reads them: a BERT with a mask takes 0.281 / 0.253 ms
    and 83 MiB in inference, and 0.330 / 0.302 and 148 if the scores are scaled. float16 has too few exponents.
    """
    if scale == 1:
        return matmul(q, k)
    is_exact = abs(math.frexp(scale)[0]) == 0.5 and q.dtype != torch.float16
    return matmul(q * scale, k) if is_exact else matmul(q, k) * scale


def matmul(a: Tensor, b: Tensor) -> Tensor:
    wide = compute_dtype(a.dtype)
    return torch.bmm(a.to(wide), b.to(wide))
