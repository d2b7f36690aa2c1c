"""The arithmetic of `kp::attention`, in the form that XLA's TPU compiler fuses best; the same on every device.

Shapes: N batch x heads, S queries, T keys, D and E widths of a head. Keys are transposed, [N, D, T], as matmuls take
them.

Scores are float32 (float64 for float64 operands). Probabilities are rounded to the dtype of the operands before the
second matmul, which the compiler accumulates in float32. The operands of a matmul are upcast first: the compiler folds
the upcast back into one bfloat16 pass with a float32 result.

The gradients are those of FlashAttention (Dao et al., arXiv:2205.14135): probabilities are recomputed from two numbers
per row, and no S x T tensor outlives a program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from kp_dynamo.ops.compute_dtype import compute_dtype
from kp_dynamo.ops.dropout_mask import Dropout
from kp_dynamo.ops.optimization_barrier import held


@dataclass(frozen=True)
class Scoring:
    """How scores are computed from q @ k: scaled, then masked. The fields are in the order of the operators' arguments.

    Attributes:
        masks: A boolean mask selects a score or its fill, any other is added; [B|1, H|1, S|1, T|1] or fewer.
        fills: Replacements for the scores where a mask is False; one number per mask.
        batch_dims: Sizes (B, H), whose product is N; empty if no mask needs them.
        scale: Factor of q @ k.
        is_causal: Whether query i reads keys 0 to i.
        zero_rows: Whether a row without keys is 0; otherwise it is NaN.
        block: Queries that are computed at a time: their scores should fit into the chip's vector memory.
    """

    masks: Sequence[Tensor]
    fills: Sequence[float]
    batch_dims: Sequence[int]
    scale: float
    is_causal: bool
    zero_rows: bool
    block: int

    @property
    def in_order(self) -> tuple[Any, ...]:
        """The arguments as the operators take them."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def blocks(self, num_queries: int, num_keys: int) -> Iterator[tuple[int, int, int]]:
        """(first query, end of queries, end of keys); causal queries read no later keys."""
        for first in range(0, num_queries, self.block):
            end = min(first + self.block, num_queries)
            yield first, end, min(end, num_keys) if self.is_causal else num_keys

    def scores(self, q: Tensor, k: Tensor, first: int) -> Tensor:
        """[N, s, D], [N, D, t] -> [N, s, t]: scores of the queries from `first` on with the first t keys."""
        scores = _scaled_matmul(q, k, self.scale)
        rows, columns = scores.shape[1:]
        for mask, fill in zip(self.masks, self.fills, strict=True):
            part = self._flat(mask, first, rows, columns)
            scores = torch.where(part, scores, fill) if mask.dtype == torch.bool else scores + part.to(scores.dtype)
        if self.is_causal:
            queries = torch.arange(first, first + rows, dtype=torch.int32, device=q.device)
            keys = torch.arange(columns, dtype=torch.int32, device=q.device)
            scores = torch.where(queries[:, None] >= keys, scores, -torch.inf)
        return scores

    def without_masked(self, d_scores: Tensor, first: int) -> Tensor:
        """Gradients of a block's scores, [N, t, s], zero where a fill replaced the score."""
        columns, rows = d_scores.shape[1:]
        for mask in self.masks:
            if mask.dtype == torch.bool:
                d_scores = torch.where(self._flat(mask, first, rows, columns).transpose(-2, -1), d_scores, 0.0)
        return d_scores

    def _flat(self, mask: Tensor, first: int, rows: int, columns: int) -> Tensor:
        """A block's slice of a mask, [N, rows, columns]."""
        if mask.dim() > 1 and mask.shape[-2] != 1:
            mask = mask[..., first : first + rows, :]
        if mask.dim() > 0 and mask.shape[-1] != 1:
            mask = mask[..., :columns]
        if all(size == 1 for size in mask.shape[:-2]):
            return mask.reshape([1] * (2 - mask.dim()) + [*mask.shape[-2:]])
        return mask.expand(*self.batch_dims, rows, columns).reshape(-1, rows, columns)


def attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, dropout: Dropout | None = None) -> Tensor:
    """[N, S, D], [N, D, T], [N, T, E] -> dropout(softmax(scores)) @ v, [N, S, E]."""
    if scoring.zero_rows or dropout is not None:
        return attention_train(q, k, v, scoring, dropout)[0]
    parts = []
    for first, end, keys in scoring.blocks(q.shape[1], k.shape[2]):
        scores = scoring.scores(q[:, first:end], k[:, :, :keys], first)
        parts.append(_matmul(scores.softmax(-1).to(v.dtype), v[:, :keys]))
    return _joined(parts, 1).to(v.dtype)


def attention_train(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, dropout: Dropout | None = None
) -> tuple[Tensor, Tensor]:
    """`attention`, and for each row its largest score and the sum of its exponentials, [2, N, S].

    They are not merged into one logsumexp: if a mask adds -1e9 to a whole row, float32 cannot hold the sum beside it.
    """
    parts = [
        _with_statistics(q[:, first:end], k[:, :, :keys], v[:, :keys], first, scoring, dropout)
        for first, end, keys in scoring.blocks(q.shape[1], k.shape[2])
    ]
    result, largest, sums = (_joined(x, 1) for x in zip(*parts, strict=True))
    return result.to(v.dtype), torch.stack([largest.squeeze(-1), sums.squeeze(-1)])


def _with_statistics(
    q: Tensor, k: Tensor, v: Tensor, first: int, scoring: Scoring, dropout: Dropout | None
) -> tuple[Tensor, Tensor, Tensor]:
    scores = scoring.scores(q, k, first)
    largest = scores.amax(-1, keepdim=True)
    if scoring.zero_rows:
        # If a row has no scores, exp(score - largest) becomes 0 instead of NaN.
        largest = largest.clamp(min=torch.finfo(largest.dtype).min)
    weights = torch.exp(scores - largest).to(v.dtype)
    result, sums = _weighted(weights, v) if dropout is None else _weighted_of_kept(weights, v, first, dropout)
    if scoring.zero_rows:
        sums = torch.where(sums == 0, torch.inf, sums)  # no keys: 0 / inf, in the gradients as well
    return result / sums, largest, sums


def _weighted(weights: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """weights @ v, and the sums of the weights."""
    # A column of ones computes both in one matmul: heads are narrower than the MXU.
    both = _matmul(weights, torch.cat([v, v.new_ones(()).expand(*v.shape[:2], 1)], -1))
    return both.narrow(-1, 0, v.shape[2]), both.narrow(-1, v.shape[2], 1)


def _weighted_of_kept(weights: Tensor, v: Tensor, first: int, dropout: Dropout) -> tuple[Tensor, Tensor]:
    """dropout(weights) @ v, and the sums of all weights: dropout comes after the softmax."""
    kept = dropout.kept(weights.shape[0], first, *weights.shape[1:])
    sums = weights.to(compute_dtype(weights.dtype)).sum(-1, keepdim=True)
    return _matmul(torch.where(kept, weights, 0.0), v) / (1 - dropout.rate), sums


@dataclass(frozen=True)
class Saved:
    """The tensors that the forward saves for the backward: q, k, v, the result, and the statistics of the rows."""

    q: Tensor
    k: Tensor
    v: Tensor
    result: Tensor
    statistics: Tensor


def attention_backward(
    grad: Tensor, saved: Saved, scoring: Scoring, factors: tuple[float, float], dropout: Dropout | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their shapes and dtypes, from the gradient of the result, [N, S, E].

    The gradient of q is multiplied by the first of `factors`, the gradient of k by the second.
    """
    scaled, delta = _scaled_gradient(grad, saved, dropout)
    rows: list[Tensor] = []
    columns: list[tuple[Tensor, Tensor]] = []
    for first, end, keys in scoring.blocks(saved.q.shape[1], saved.k.shape[2]):
        block = _Block(
            scaled[:, first:end], delta[:, first:end], saved.statistics[0, :, first:end],
            saved.q[:, first:end], saved.k[:, :, :keys], saved.v[:, :keys],
        )  # fmt: skip
        d_q, d_k, d_v = block.gradients(first, scoring, dropout)
        rows.append(d_q)
        columns.append((d_k, d_v))
    d_k = _sum_of_parts([k for k, _ in columns], 2, saved.k.shape[2])
    d_v = _sum_of_parts([v for _, v in columns], 1, saved.v.shape[1])
    d_q = _joined(rows, 1) * factors[0]
    return d_q.to(saved.q.dtype), (d_k * factors[1]).to(saved.k.dtype), d_v.to(saved.v.dtype)


def _scaled_gradient(grad: Tensor, saved: Saved, dropout: Dropout | None) -> tuple[Tensor, Tensor]:
    """The gradient of the result over the rows' sums, and its product with the result, [N, S, 1]."""
    wide = compute_dtype(grad.dtype)
    # Probabilities are only used times this gradient, so the gradient is divided by the sums instead of them, and by
    # the share that dropout keeps.
    sums, share = saved.statistics[1].unsqueeze(-1), 1.0 if dropout is None else 1 - dropout.rate
    scaled = (grad.to(wide) / (sums if share == 1 else sums * share)).to(grad.dtype)
    # From the rounded values that the matmuls read: d_w - delta is often much smaller than either.
    delta = (scaled.to(wide) * saved.result.to(wide)).sum(-1, keepdim=True)
    return scaled, delta if share == 1 else delta * share


@dataclass(frozen=True)
class _Block:
    """A block of queries with the keys that they read; `grad` and `delta` are divided by the rows' sums."""

    grad: Tensor
    delta: Tensor
    largest: Tensor
    q: Tensor
    k: Tensor
    v: Tensor

    def gradients(self, first: int, scoring: Scoring, dropout: Dropout | None) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v. Scores are [t, s], and a barrier materializes them: measured to be best."""
        dtype = self.grad.dtype
        scores = held(scoring.scores(self.q, self.k, first).transpose(1, 2))
        weights = torch.exp(scores - self.largest.unsqueeze(1)).to(dtype)
        d_w = _matmul(self.v, self.grad.transpose(1, 2))
        used = weights
        if dropout is not None:
            kept = dropout.kept(self.q.shape[0], first, self.q.shape[1], self.v.shape[1]).transpose(1, 2)
            d_w, used = torch.where(kept, d_w, 0.0), torch.where(kept, weights, 0.0)
        d_s = weights.to(d_w.dtype) * (d_w - self.delta.transpose(1, 2))
        d_s = scoring.without_masked(d_s, first).to(dtype)
        d_q = _matmul(d_s.transpose(1, 2), self.k.transpose(1, 2))
        return d_q, _matmul(d_s, self.q).transpose(1, 2), _matmul(used, self.grad)


def _sum_of_parts(parts: list[Tensor], dim: int, size: int) -> Tensor:
    """The sum of parts that start at 0 along `dim` and have increasing sizes, zero-padded to `size`."""
    pieces: list[Tensor] = []
    begin = 0
    for number, part in enumerate(parts):
        length = part.shape[dim] - begin
        if length:
            sources = [other.narrow(dim, begin, length) for other in parts[number:]]
            pieces.append(_added(sources))
            begin += length
    if begin < size:  # keys that no query reads
        shape = [*parts[0].shape]
        shape[dim] = size - begin
        pieces.append(parts[0].new_zeros(shape))
    return _joined(pieces, dim)


def _added(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _scaled_matmul(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """q @ k times `scale`. If that is exact, the queries are scaled: by 1/8 for heads of 64.

    A v6e's compiler then fuses the scores into the matmul that reads them: a BERT with a mask takes 0.281 / 0.253 ms
    and 83 MiB in inference, and 0.330 / 0.302 and 148 if the scores are scaled. float16 has too few exponents.
    """
    if scale == 1:
        return _matmul(q, k)
    is_exact = abs(math.frexp(scale)[0]) == 0.5 and q.dtype != torch.float16
    return _matmul(q * scale, k) if is_exact else _matmul(q, k) * scale


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    wide = compute_dtype(a.dtype)
    return torch.bmm(a.to(wide), b.to(wide))
