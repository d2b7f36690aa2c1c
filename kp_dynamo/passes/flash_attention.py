"""The pass `flash_attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from kp_dynamo.graph.editing import insert_call, replace_node
from kp_dynamo.graph.nodes import calls, fake_of
from kp_dynamo.ops import flash_attention as _ops  # noqa: F401  # registers the operators
from kp_dynamo.ops.attention_args import AttentionArgs
from kp_dynamo.passes.attention.backwards import backwards_of
from kp_dynamo.passes.base import PassReport, Refusal, rewrite_each

kp = torch.ops.kp

_LANES = 128
_WIDEST = 256
"""A v5e runs out of vector memory for the backward at 512 (float32, blocks of 512); widths between are untested."""
_DTYPES = (torch.bfloat16, torch.float32)
_FLASH: dict[Any, Any] = {
    kp.attention.default: kp.flash_attention.default,
    kp.attention_train.default: kp.flash_attention_train.default,
    kp.attention_backward.default: kp.flash_attention_backward.default,
}


@dataclass(frozen=True)
class FlashAttention:
    """Compute `kp::attention` with a TPU's flash attention kernel: changes the order of sums, and rounds once more.

        before                                                 after
        attention: bf16[4, 256, 64] = kp.attention.default(    flash_attention: bf16[4, 256, 64] =
            q, k, v, [], [], [], 0.125, True, False, 512)          kp.flash_attention.default(q, k, v, 0.125, True, 256)

    `kp::attention_train` and its `kp::attention_backward` are rewritten together, or not at all. On a TPU, and when
    compiling ahead of time for one, the kernels are those of JAX (`jax.experimental.pallas.ops.tpu.flash_attention`,
    Dao et al., arXiv:2205.14135). On XLA:CPU the operators compute the same as `kp::attention`. The pass is off by
    default, because no compiler estimates the time of a kernel.

        options={"extra_passes": [FlashAttention()]}

    1. Fires on attention without a mask, and on causal attention: query i reads keys 0 to i, for any S and T.

    Refuses, with the reason

    2. masks that are operands, sinks, and rows that may have no key;
    3. symbolic sizes: a kernel is built for fixed sizes;
    4. a number of queries or keys that is not a multiple of 128;
    5. values whose width differs from that of the keys, and widths that the kernel has no layout for;
    6. operands that are neither bfloat16 nor float32;
    7. a scale of 0: the kernel's gradients could not be divided by it.

    The kernel returns the gradients of queries and keys multiplied by the scale and rounded. They are rescaled
    afterwards to what the graph expects: one more rounding, in bfloat16. Float32 matmuls are one bfloat16 pass at
    matmul precision "default", like those outside the kernel, and float32 at the two others. Of several devices
    each computes its own sequences along "data" and its own heads along "model"; if the heads of all sequences do not
    divide among them, or on a mesh with other axes, the program has `kp::attention`'s form.

    Attributes:
        block: The most queries, and keys, that a kernel holds in vector memory at a time: a multiple of 128.
    """

    block: int = 512

    def __post_init__(self) -> None:
        if self.block < _LANES or self.block % _LANES:
            raise ValueError(
                f"FlashAttention: block={self.block!r} is invalid. Allowed: multiples of {_LANES}, e.g. 512."
            )

    name: ClassVar[str] = "flash_attention"
    reads_modules: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        attentions = calls(gm.graph, kp.attention.default, kp.attention_train.default)
        return rewrite_each(self.name, attentions, _match, self._rewrite)

    def _rewrite(self, found: list[fx.Node]) -> None:
        for node in found:
            args = AttentionArgs.of(node)
            scale, is_causal = args.scoring.scale, args.scoring.is_causal
            num_queries, num_keys = fake_of(args.q).shape[1], fake_of(args.v).shape[1]
            block = next(b for b in range(self.block, 0, -_LANES) if num_queries % b == 0 and num_keys % b == 0)
            with node.graph.inserting_before(node):
                arguments = (*args.operands, scale, is_causal, block, *args.factors)
                made = insert_call(node.graph, _FLASH[node.target], arguments, {}, like=node)
            replace_node(node, made)


def _match(attention: fx.Node) -> list[fx.Node] | Refusal:
    """The backward of an attention, if it has one, and the attention, if the kernel can compute them."""
    problem = _problem(AttentionArgs.of(attention))
    return [*backwards_of(attention), attention] if problem is None else Refusal(attention, problem)


def _problem(args: AttentionArgs) -> str | None:
    """The reason why the kernel cannot compute an attention, or None."""
    q, v, scoring = fake_of(args.q), fake_of(args.v), args.scoring
    sizes = (q.shape[1], v.shape[1], q.shape[2], v.shape[2])
    if scoring.masks:
        return f"{len(scoring.masks)} mask(s) among its operands. Allowed: no mask, or causal attention"
    if args.dropout is not None:
        return "dropout of its probabilities"
    if scoring.soft_cap:
        return "a soft cap of its scores"
    if scoring.sinks is not None:
        return "sinks"
    if scoring.zero_rows:
        return "rows that may have no key"
    if any(isinstance(size, torch.SymInt) for size in (*sizes, q.shape[0])):
        return f"symbolic sizes: {', '.join(map(str, (*sizes, q.shape[0])))}"
    if q.dtype not in _DTYPES:
        return f"operands of {q.dtype}. Allowed: bfloat16, float32"
    if scoring.scale == 0:
        return "a scale of 0"
    return _size_problem(*sizes)


def _size_problem(num_queries: int, num_keys: int, width: int, value_width: int) -> str | None:
    if num_queries % _LANES or num_keys % _LANES:
        return f"{num_queries} queries and {num_keys} keys. Allowed: multiples of {_LANES}"
    if width != value_width:
        return f"queries of width {width} and values of width {value_width}. Allowed: equal widths"
    if width > _WIDEST or (width > _LANES and width % _LANES):
        return f"a head of width {width}. Allowed: up to {_LANES}, and {_WIDEST}"
    return None
