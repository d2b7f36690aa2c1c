"""Edits a graph: `kp::attention` in place of an attention, `kp::attention_backward` in place of its backward."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import hint_int

from kp_dynamo.graph.editing import FakeRuns, cast_to, erase_unused, insert_call
from kp_dynamo.graph.nodes import tensor_of
from kp_dynamo.graph.op_tables import VIEWS
from kp_dynamo.ops.attention_args import AttentionArgs, BackwardArgs
from kp_dynamo.ops.attention_scoring import Scoring
from kp_dynamo.ops.compute_dtype import compute_dtype
from kp_dynamo.ops.dropout_mask import Dropout
from kp_dynamo.passes.attention.gradients import Gradients
from kp_dynamo.passes.attention.keyed_dropout import erase_random, key_of
from kp_dynamo.passes.attention.known_masks import without_known
from kp_dynamo.passes.attention.pattern import Attention
from kp_dynamo.passes.attention.score_chain import Mask
from kp_dynamo.passes.attention.shared_heads import Sharing, sharing_of
from kp_dynamo.passes.constants.values import MAX_FACTOR, Constant, factor_of

aten, kp = torch.ops.aten, torch.ops.kp

# A training step of a Llama of 2 layers, S 512, whose heads share keys in pairs takes 3.56 ms modelled with all queries
# in a block, 3.35 in two blocks. Many small blocks make long programs.
_LEAST_BLOCK = 128
# Half of the vector memory of a v5e. A block of Stable Diffusion's UNet, whose blocks of 512 queries have scores of
# 128 MiB, takes 9.19 ms modelled with these and 3.70 with half of the queries in a block.
_MOST_BYTES = 64 << 20


class Rewriting:
    """Replaces one attention.

    Args:
        graph: The graph.
        found: The attention.
        block: See `RewriteAttention`.
        runs: For the values of the nodes that are inserted.
    """

    def __init__(self, graph: fx.Graph, found: Attention, block: int, runs: FakeRuns) -> None:
        self.graph, self.found, self.block = graph, found, block
        self.insert = partial(insert_call, graph, runs=runs)
        self.k: Any = found.k
        self.v: Any = found.second.args[1]
        self.sharing: Sharing | None = None

    def run(self, gradients: Gradients | None) -> None:
        """Put the operators in place of the attention and of its backward, if the graph has one."""
        found = self.found
        self._share(gradients)
        with self.graph.inserting_before(found.second):
            q, q_factor = self._unscaled(found.q, found.scale)
            k, k_factor = self._unscaled(self.k, found.scale * q_factor)
            scale = _rounded(found.scale * q_factor * k_factor)
            args = AttentionArgs(q, k, self.v, self._scoring(scale), dropout=self._dropout())
            target = kp.attention.default if gradients is None else kp.attention_train.default
            made = self.insert(target, args.in_order, {}, like=found.second)
            result = made if gradients is None else self._part(made, 0)
            found.second.replace_all_uses_with(result)
            if gradients is not None:
                factors = (scale / q_factor, scale / k_factor)
                backward = BackwardArgs(gradients.grad, result, self._part(made, 1), factors)
                self._put_gradients(gradients, replace(args, backward=backward))
        erase_unused(found.second)
        if found.dropout is not None and not found.dropout.random.users:
            erase_random(found.dropout.random)

    def _share(self, gradients: Gradients | None) -> None:
        """Take keys and values that several heads share without their repetition."""
        d_k, d_v = (None, None) if gradients is None else (gradients.d_k, gradients.d_v)
        sharing = sharing_of(self.k, self.v, d_k, d_v)
        if sharing is None or (gradients is not None and gradients.bias is not None and self._mixes_batch(sharing)):
            return
        self.sharing = sharing
        with self.graph.inserting_before(self.found.second):
            self.k, self.v = sharing.k.once(self.insert), sharing.v.once(self.insert)

    def _mixes_batch(self, sharing: Sharing) -> bool:
        """Whether heads of several sequences share keys: the sum over the batch, of a bias, could not separate them."""
        num_heads = self.found.batch_dims[1]
        return not isinstance(num_heads, int) or num_heads % sharing.k.count != 0

    def _put_gradients(self, gradients: Gradients, args: AttentionArgs) -> None:
        replaced = [node for node in gradients.results if node is not None]
        # The first matmul that reads the gradient; this may be d_w if d_v is not needed.
        first = min(n for n in (*replaced, *gradients.inside) if gradients.grad in n.all_input_nodes)
        with self.graph.inserting_before(first):
            target = _backward_of(gradients)
            made = self.insert(target, args.in_order, {}, like=first)
            parts = [self._part(made, i) if node else None for i, node in enumerate(gradients.results)]
            d_bias = None if gradients.bias is None else self._part(made, 3)
            if gradients.sinks is not None:
                self._put_sinks(gradients.sinks, self._part(made, 3))
        if gradients.bias is not None and d_bias is not None:
            gradients.bias.put(d_bias, self.insert)
        sums = (None, None, None) if self.sharing is None else (None, self.sharing.d_k, self.sharing.d_v)
        for node, part, total in zip(gradients.results, parts, sums, strict=True):
            if total is not None and part is not None:
                total.put(part, self.insert)
            elif node is not None and part is not None:
                node.replace_all_uses_with(part)
                erase_unused(node)

    def _put_sinks(self, replaced: fx.Node, rows: fx.Node) -> None:
        """Take `rows` [N, S] for the gradient of the sinks, [..., S, 1]."""
        part = self.insert(aten.reshape.default, (rows, [*self.found.batch_dims, -1, 1]), {}, like=replaced)
        replaced.replace_all_uses_with(cast_to(part, tensor_of(replaced).dtype, like=replaced))  # type: ignore[union-attr]
        erase_unused(replaced)

    def _part(self, node: fx.Node, index: int) -> fx.Node:
        return self.insert(operator.getitem, (node, index), {}, like=node)

    def _unscaled(self, node: Any, scale: float) -> tuple[fx.Node, float]:
        """An operand without its factor, in its shape, and the factor, which must not make `scale` too large."""
        views, scaled = [], node
        while scaled.target in VIEWS:
            views.append(scaled)
            scaled = scaled.args[0]
        factor = factor_of(scaled)
        if factor is None or abs(scale * factor) > MAX_FACTOR or not _has_same_strides(scaled, scaled.args[0]):
            return node, 1.0
        made = scaled.args[0]
        for view in reversed(views):
            made = self.insert(view.target, (made, *view.args[1:]), view.kwargs, like=view)
        return made, factor

    def _scoring(self, scale: float) -> Scoring:
        masks, causal = self._masks()
        nodes: Any = [self._as_kept(mask) for mask in masks]
        can_be_empty = self.found.zeroes_rows and bool(masks)
        sinks: Any = None if self.found.sinks is None else self.found.sinks.values
        batch_dims = self.found.batch_dims if masks or sinks else ()
        fills, soft_cap = [self._fill(mask) for mask in masks], self.found.soft_cap
        return Scoring(nodes, fills, batch_dims, scale, causal, can_be_empty, self._block(), soft_cap, sinks)

    def _block(self) -> int:
        """Queries that are computed at a time: of heads that share keys, the rows are computed together."""
        count = 1 if self.sharing is None else self.sharing.k.count
        fitting = self.block
        while fitting > _LEAST_BLOCK and fitting * self._bytes_of_a_query() > _MOST_BYTES:
            fitting //= 2
        return min(self.block, max(min(self.block // count, fitting), _LEAST_BLOCK))

    def _bytes_of_a_query(self) -> int:
        """Bytes of the scores of one query in all heads, in float32, and of the masks that are repeated beside them."""
        *others, _, num_keys = tensor_of(self.found.softmax).shape  # type: ignore[union-attr]
        size = 4 * math.prod(hint_int(size, fallback=1) for size in (*others, num_keys))
        return size * (1 + sum(_is_repeated(mask.node) for mask in self.found.masks))

    def _dropout(self) -> Dropout | None:
        """The dropout by a key."""
        if self.found.dropout is None:
            return None
        return Dropout(key_of(self.found.dropout.random, self.insert), self.found.dropout.rate)

    def _masks(self) -> tuple[list[Mask], bool]:
        """The remaining masks, and whether the others amount to a causal one."""
        sizes = tensor_of(self.found.first).shape[-2:]  # type: ignore[union-attr]
        if not all(isinstance(size, int) for size in sizes):
            return list(self.found.masks), False
        return without_known(self.found.masks, *sizes)

    def _as_kept(self, mask: Mask) -> fx.Node:
        """A mask in the form the operators take: booleans that are True where a score stays, or numbers to add."""
        if mask.fill is None:
            is_boolean = tensor_of(mask.node).dtype == torch.bool  # type: ignore[union-attr]
            return cast_to(mask.node, torch.float32, like=mask.node) if is_boolean else mask.node
        return (
            mask.node if mask.lets_through else self.insert(aten.bitwise_not.default, (mask.node,), {}, like=mask.node)
        )

    def _fill(self, mask: Mask) -> float:
        """The fill value of a boolean mask in the dtype of the scores: a factor may push it out of their range."""
        dtype = tensor_of(self.found.second).dtype  # type: ignore[union-attr]
        return Constant(mask.fill or 0.0, None).as_float(compute_dtype(dtype))


def _is_repeated(mask: fx.Node) -> bool:
    """Whether XLA repeats a mask of queries and keys for every head: it has a batch, so its heads are no whole axis."""
    shape = tensor_of(mask).shape  # type: ignore[union-attr]
    return len(shape) > 2 and shape[-2] != 1 and any(size != 1 for size in shape[:-2])


def _backward_of(gradients: Gradients) -> Any:
    """The overload that returns these gradients."""
    if gradients.bias is not None:
        return kp.attention_backward.bias
    return kp.attention_backward.default if gradients.sinks is None else kp.attention_backward.sinks


def _rounded(scale: float) -> float:
    """The scale, snapped to a power of two within rounding error: SDPA computes 1/8 as the square of its root."""
    mantissa, exponent = math.frexp(scale)
    for power in (0.5, 1.0):
        if math.isclose(abs(mantissa), power, rel_tol=1e-15):
            return math.copysign(math.ldexp(power, exponent), scale)
    return scale


def _has_same_strides(node: fx.Node, source: Any) -> bool:
    """Whether views of `node` are views of `source` too."""
    one, other = tensor_of(node), tensor_of(source)
    return one is not None and other is not None and one.stride() == other.stride() and one.dtype == other.dtype
