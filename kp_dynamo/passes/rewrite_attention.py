"""The pass `rewrite_attention`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from torch import fx

from kp_dynamo.graph.editing import FakeRuns
from kp_dynamo.graph.nodes import calls, forward_nodes
from kp_dynamo.graph.op_tables import SOFTMAXES
from kp_dynamo.passes.attention.dropout import AppliedDropout
from kp_dynamo.passes.attention.gradients import Gradients, gradients_of
from kp_dynamo.passes.attention.keyed_dropout import draw_by_key
from kp_dynamo.passes.attention.pattern import Attention, attention_at
from kp_dynamo.passes.attention.rewriting import Rewriting
from kp_dynamo.passes.base import PassReport, Refusal, rewrite_each


@dataclass(frozen=True)
class RewriteAttention:
    """Replace attention by `kp::attention`: changes numerics, by rounding less often.

        before                                                    after
        mul: f32[2, 2, 8, 4] = aten.mul.Scalar(q, 0.70)           attention: f32[4, 8, 4] = kp.attention.default(q_, k_,
        ...                                                           v_, [], [], [], 0.5, True, False, 512)
        bmm: f32[4, 8, 8] = aten.bmm.default(view, view_1)
        add: f32[2, 2, 8, 8] = aten.add.Tensor(view_2, where)
        _softmax: ...
        bmm_1: f32[4, 8, 4] = aten.bmm.default(view_3, view_4)

    In a joint graph the op is `kp::attention_train`, and the backward becomes `kp::attention_backward`, which reads q,
    k, v, the result and two numbers per row, [2, N, S]: no value of [S, S] is saved.

    Fires on the decomposition of scaled_dot_product_attention, and on the same computation written by hand, in any
    model:

    1. bmm, softmax over the keys, bmm; copies, casts, and views of N as B and H between them;
    2. factors, boolean masks that select between a score and a number, and added tensors, in any order in which the
       factors come first, then at most one soft cap (tanh, as in Gemma 2). For rows without a score above -inf, both
       torch's zeros and the NaN of a plain softmax match;
    3. factors of q and k (SDPA applies the root of its scale to both) become one factor of the scores;
    4. masks computed only from constants are evaluated. A mask that keeps every score is removed. A mask that lets
       query i read keys 0 to i becomes a comparison of positions, if every query keeps a key under all masks together
       (`known_masks.py`). A mask that depends on an input is never treated as causal, nor is any mask applied with it:
       its rows may have no key left.

    5. keys and values that several heads share (`repeat_kv`, `enable_gqa=True`): they are not repeated, if their
       gradients are summed over these heads and not read otherwise, and if heads of several sequences do not share them
       beside a learned bias (`attention/shared_heads.py`);
    6. dropout of the probabilities, as torch writes it: the operators get a key of four random numbers in place of
       the random numbers, and compute the mask from it in the forward and in the backward (`ops/dropout_mask.py`). If
       the attention is refused for its gradient or another reader, `kp::dropout_mask` computes the same mask
       (`attention/keyed_dropout.py`); that counts as a rewrite too;

    7. a learned bias that all sequences read, such as T5's relative positions: its gradient, [H, S, T], is a result of
       the backward (`attention/learned_bias.py`);
    8. sinks, as in GPT-OSS: a score that is appended to each row, and dropped after the softmax; their gradient,
       [N, S], is a result of the backward (`attention/sinks.py`);
    9. scores or probabilities that something else reads in a joint graph, without a gradient: the first matmul and the
       softmax stay for that reader.

    Refuses, with the reason

    10. any other op between the softmax and its matmul;
    11. scores or probabilities with another reader in inference, where nothing would be gained; those that get a
        gradient from another reader; those that another reader reads after their dropout, whose mask would be another;
    12. any other learned mask: its gradient has the size of the scores; a learned bias beside learned sinks;
    13. operands of several dtypes;
    14. scores that are transposed, regrouped, repeated, rounded to a narrower dtype or upcast to float64 in between
        (`score_layout.py`): a softmax over queries, groups of heads in the rows of a matmul;
    15. scores times more than 1e3 (`constants/values.py`).

    Keys stay [N, D, T], as the matmul reads them, and shared ones [M, D, T]. A mask that is not evaluated is an operand
    of both operators, and may be saved at its own size. docs/measurements.md has the measured effect.

    Attributes:
        block: Queries that are computed at a time, or rows of queries if heads share keys, but at least 128 queries.
            Causal attention skips the keys after them. It is halved while a block's scores, and masks repeated for all
            heads, take more than 64 MiB.
    """

    block: int = 512

    name: ClassVar[str] = "rewrite_attention"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        forward = {n for n in forward_nodes(gm.graph) if n.op == "call_function"}
        backward = {n for n in gm.graph.nodes if n.op == "call_function"} - forward
        runs = FakeRuns()
        kept: list[AppliedDropout] = []

        def match(softmax: fx.Node) -> _Match | Refusal | None:
            attention = attention_at(softmax, forward)
            if attention is None or isinstance(attention, Refusal):
                return attention
            found = _match(attention, backward)
            if isinstance(found, Refusal) and attention.dropout is not None:
                kept.append(attention.dropout)
            return found

        def rewrite(found: _Match) -> None:
            Rewriting(gm.graph, found.attention, self.block, runs).run(found.gradients)

        softmaxes = (softmax for softmax in calls(gm.graph, *SOFTMAXES) if softmax in forward)
        report = rewrite_each(self.name, softmaxes, match, rewrite)
        for dropout in kept:
            draw_by_key(gm.graph, dropout, runs)
        return replace(report, rewritten=report.rewritten + len(kept))


class _Match(NamedTuple):
    """An attention, and its backward if the graph has one."""

    attention: Attention
    gradients: Gradients | None


def _match(found: Attention, backward: set[fx.Node]) -> _Match | Refusal:
    gradients = gradients_of(found, backward)
    if isinstance(gradients, Refusal):
        reasons = [reason for reason in (found.reading, gradients.reason) if reason]
        return Refusal(found.softmax, ", and ".join(reasons))
    if gradients is None and found.reading:
        return Refusal(found.softmax, f"{found.reading}: without a gradient, there is nothing to gain")
    return _Match(found, gradients)
