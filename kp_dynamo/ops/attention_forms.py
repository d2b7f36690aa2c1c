"""The arithmetic of `kp::attention`, in the form that XLA's TPU compiler fuses best; the same on every device.

Shapes: N batch x heads, S queries, T keys, D and E widths of a head. Keys are transposed, [M, D, T], as matmuls take
them. Several heads may share keys and values: M = N / G, and the rows of G neighbouring heads are put together, so that
no key is repeated.

Scores are float32 (float64 for float64 operands). Probabilities are rounded to the dtype of the operands before the
second matmul, which the compiler accumulates in float32. The operands of a matmul are upcast first: the compiler folds
the upcast back into one bfloat16 pass with a float32 result.

The gradients are those of FlashAttention (Dao et al., arXiv:2205.14135): probabilities are recomputed from two numbers
per row, and no S x T tensor outlives a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kp_dynamo.ops.attention_scoring import Scoring, matmul, with_heads_of
from kp_dynamo.ops.compute_dtype import compute_dtype
from kp_dynamo.ops.dropout_mask import Dropout
from kp_dynamo.ops.optimization_barrier import held

_FEW_ROWS = 8  # sublanes of a TPU's vector registers
_NARROW = 64
"""Up to this width of a head, the compilers compute scores again in the softmax. Of wider heads they would write the
scores to HBM twice: a Qwen3 of 2 layers, D 128, in inference takes 1.60 ms modelled on v5e, 1.25 in the form for
training (v6e 0.78 / 0.61, v5p 0.97 / 1.00). Of narrow ones that form is slower on v5p: a BERT, S 2048, 0.57 / 0.76."""


def attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, dropout: Dropout | None = None) -> Tensor:
    """[N, S, D], [M, D, T], [M, T, E] -> dropout(softmax(scores)) @ v, [N, S, E]."""
    if scoring.zero_rows or scoring.sinks is not None or dropout is not None or q.shape[2] > _NARROW:
        return attention_train(q, k, v, scoring, dropout)[0]
    parts = []
    for first, end, keys in scoring.blocks(q.shape[1], k.shape[2]):
        scores = scoring.scores(q[:, first:end], k[:, :, :keys], first)
        parts.append(with_heads_of(q, matmul(scores.softmax(-1).to(v.dtype), v[:, :keys])))
    return _joined(parts, 1).to(v.dtype)


def attention_train(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, dropout: Dropout | None = None
) -> tuple[Tensor, Tensor]:
    """`attention`, and for each row its largest score and the sum of its exponentials, [2, N, S], with its sink.

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
    largest, sinks = scores.amax(-1, keepdim=True), scoring.sink_scores(q, k, first)
    if sinks is not None:
        largest = torch.maximum(largest, sinks)
    if scoring.zero_rows:
        # If a row has no scores, exp(score - largest) becomes 0 instead of NaN.
        largest = largest.clamp(min=torch.finfo(largest.dtype).min)
    weights = torch.exp(scores - largest).to(v.dtype)
    if dropout is None:
        result, sums = _weighted(weights, v)
    else:
        kept = with_heads_of(v, dropout.kept(q.shape[0], first, q.shape[1], v.shape[1]))
        result, sums = _weighted_of_kept(weights, v, kept, dropout.rate)
    if sinks is not None:
        sums = sums + torch.exp(sinks - largest)
    if scoring.zero_rows:
        sums = torch.where(sums == 0, torch.inf, sums)  # no keys: 0 / inf, in the gradients as well
    return with_heads_of(q, result / sums), with_heads_of(q, largest), with_heads_of(q, sums)


def _weighted(weights: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """weights @ v, and the sums of the weights."""
    # A column of ones computes both in one matmul: heads are narrower than the MXU. Not in a decode step, which reads
    # keys and values for a row or two: 8 layers, B 8 and 2048 keys take 0.67 ms without the column, 0.74 with it.
    if weights.shape[1] < _FEW_ROWS:
        return matmul(weights, v), _sums(weights)
    both = matmul(weights, torch.cat([v, v.new_ones(()).expand(*v.shape[:2], 1)], -1))
    return both.narrow(-1, 0, v.shape[2]), both.narrow(-1, v.shape[2], 1)


def _weighted_of_kept(weights: Tensor, v: Tensor, kept: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """dropout(weights) @ v, and the sums of all weights: dropout comes after the softmax."""
    return matmul(torch.where(kept, weights, 0.0), v) / (1 - rate), _sums(weights)


def _sums(weights: Tensor) -> Tensor:
    return weights.to(compute_dtype(weights.dtype)).sum(-1, keepdim=True)


@dataclass(frozen=True)
class Saved:
    """The tensors that the forward saves for the backward: q, k, v, the result, and the statistics of the rows."""

    q: Tensor
    k: Tensor
    v: Tensor
    result: Tensor
    statistics: Tensor


def attention_backward(
    grad: Tensor,
    saved: Saved,
    scoring: Scoring,
    factors: tuple[float, float],
    dropout: Dropout | None = None,
    also: Literal["", "bias", "sinks"] = "",
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v, in their shapes and dtypes, from the gradient of the result, [N, S, E].

    Those of shared keys and values are sums over the heads that share them. The gradient of q is multiplied by the
    first of `factors`, the gradient of k by the second. `also` asks for a fourth result, in the dtype of the scores.
    "bias": the gradient of a bias [H, S, T] among the masks, which all sequences read: their sum. "sinks": the gradient
    of the sink of each row, [N, S].
    """
    scaled, delta = _scaled_gradient(grad, saved, dropout)
    parts: list[_Gradients] = []
    for first, end, keys in scoring.blocks(saved.q.shape[1], saved.k.shape[2]):
        block = _Block(
            scaled[:, first:end], delta[:, first:end], saved.statistics[0, :, first:end, None],
            saved.q[:, first:end], saved.k[:, :, :keys], saved.v[:, :keys],
        )  # fmt: skip
        parts.append(block.gradients(first, scoring, dropout))
    d_k = _sum_of_parts([part.k for part in parts], 2, saved.k.shape[2])
    d_v = _sum_of_parts([part.v for part in parts], 1, saved.v.shape[1])
    d_q = _joined([part.q for part in parts], 1) * factors[0]
    found = d_q.to(saved.q.dtype), (d_k * factors[1]).to(saved.k.dtype), d_v.to(saved.v.dtype)
    if also == "sinks":
        return *found, _joined([part.sinks for part in parts], 1).squeeze(-1)
    if not also:
        return found
    num_keys = saved.k.shape[2]
    biases = [_bias_gradient(part.scores, scoring.batch_dims, part.q.shape[1], num_keys) for part in parts]
    return *found, _joined(biases, 1)


def _bias_gradient(d_scores: Tensor, batch_dims: Sequence[int], num_rows: int, num_keys: int) -> Tensor:
    """[M, t, G * s] -> [H, s, T]: the sum over the batch, and zeros for keys that no query of the block reads."""
    num_sequences, num_heads = batch_dims
    keys = d_scores.shape[1]
    of_sequences = d_scores.reshape(num_sequences, -1, keys, d_scores.shape[2])
    total = of_sequences.sum(0).reshape(-1, keys, d_scores.shape[2] // num_rows, num_rows)
    total = total.permute(0, 2, 3, 1).reshape(num_heads, num_rows, keys)
    return torch.nn.functional.pad(total, (0, num_keys - keys)) if keys < num_keys else total


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
class _Gradients:
    """The gradients of a block's q, k, v, scores, those [M, t, G * s] and not rounded, and sinks, [N, s, 1]."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    sinks: Tensor


@dataclass(frozen=True)
class _Block:
    """A block of queries with the keys that they read; `grad` and `delta` are divided by the rows' sums."""

    grad: Tensor
    delta: Tensor
    largest: Tensor
    q: Tensor
    k: Tensor
    v: Tensor

    def gradients(self, first: int, scoring: Scoring, dropout: Dropout | None) -> _Gradients:
        """The gradients. Scores are [t, s], and a barrier materializes them: measured to be best."""
        dtype = self.grad.dtype
        q, grad, delta, largest = (with_heads_of(self.v, x) for x in (self.q, self.grad, self.delta, self.largest))
        scores = held(scoring.scores(self.q, self.k, first).transpose(1, 2))
        weights = torch.exp(scores - largest.transpose(1, 2)).to(dtype)
        d_w = matmul(self.v, grad.transpose(1, 2))
        used = weights
        if dropout is not None:
            kept = with_heads_of(self.v, dropout.kept(self.q.shape[0], first, self.q.shape[1], self.v.shape[1]))
            kept = kept.transpose(1, 2)
            d_w, used = torch.where(kept, d_w, 0.0), torch.where(kept, weights, 0.0)
        d_s = weights.to(d_w.dtype) * (d_w - delta.transpose(1, 2))
        exact = scoring.without_masked(d_s, first, self.q.shape[0] // self.k.shape[0])
        d_s = scoring.through_cap(exact, self.q, self.k).to(dtype)
        d_q = matmul(d_s.transpose(1, 2), self.k.transpose(1, 2))
        d_k, d_v, d_sinks = matmul(d_s, q).transpose(1, 2), matmul(used, grad), self._d_sinks(first, scoring)
        return _Gradients(with_heads_of(self.q, d_q), d_k, d_v, exact, d_sinks)

    def _d_sinks(self, first: int, scoring: Scoring) -> Tensor:
        """The gradient of the sink of each row; its probability has no value, so only the other probabilities fall."""
        sinks = scoring.sink_scores(self.q, self.k, first)
        if sinks is None:
            return self.delta
        delta, largest = (with_heads_of(self.v, x) for x in (self.delta, self.largest))
        return with_heads_of(self.q, -torch.exp(sinks - largest) * delta)


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
