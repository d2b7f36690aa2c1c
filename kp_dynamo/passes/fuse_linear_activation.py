"""The pass `fuse_linear_activation`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import fx

from kp_dynamo.graph.editing import insert_call
from kp_dynamo.graph.nodes import calls, fake_of, forward_nodes
from kp_dynamo.graph.op_tables import RESHAPES
from kp_dynamo.ops.linear_act import fits
from kp_dynamo.passes.base import PassReport, Refusal, rewrite_each
from kp_dynamo.passes.linear.activations import activations_of, is_any_cast, rounds
from kp_dynamo.passes.linear.pattern import LINEAR_MATMULS, Linear, has_shape, linear_at, only_user

aten = torch.ops.aten
kp = torch.ops.kp


@dataclass(frozen=True)
class FuseLinearActivation:
    """Fuse Linear, activation and gate into `kp::linear_act`: changes numerics, by rounding once instead of at each op.

        before                                                after
        addmm: bf16[6, 8] = aten.addmm.default(b, x, w)       linear_act: bf16[6, 8] = kp.linear_act.default(
        view: bf16[2, 3, 8] = aten.view.default(addmm, ...)       x, w, b, "gelu")
        gelu: bf16[2, 3, 8] = aten.gelu.default(view)         view_1: bf16[2, 3, 8] = aten.view.default(linear_act, ...)

    Fires on

    1. aten.mm and aten.addmm (beta = alpha = 1), with a bias [N] in the addmm or added after views;
    2. followed by ReLU, GELU (erf or tanh), SiLU, Tanh or Sigmoid, as one op or spelled out (see `activations.py`);
    3. followed by a multiplication with a value of the same shape (SiLU(gate) * up): the multiplier of the op. The
       multiplier must be [M, N] before its view; otherwise the gate stays and only the activation is fused;
    4. casts in between, and one after if nothing else reads the uncast result, become the `out_dtype`, if the compute
       dtype of the op (float32; float64 for float64) holds every value of the cast's dtype: never less accurate.

    In a joint graph the backward reads the pre-activation, or intermediate values of the activation (the tanh of a
    spelled out GELU, the SiLU of a gated one). Then the op is `kp::linear_act_train`, whose second result is the
    pre-activation: saved in the dtype of the operands, as without the pass. Intermediate values stay in the graph,
    computed from the pre-activation and read only by the backward. The partitioner moves these few pointwise ops next
    to the gradient, and saves no more than without the pass. The backward of ReLU, Tanh and Sigmoid reads their result,
    and needs nothing more.

    Refuses, with the reason, an activation of a matmul if

    5. the forward reads the pre-activation or an intermediate value elsewhere, or it is an output of the graph: the op
       would be computed in addition to the matmul, not instead of it;
    6. the backward reads the matmul without its bias, which the op does not return;
    7. dtypes are integer or complex, or the bias has another dtype than the matmul (the pre-activation would be saved
       in fewer bits than the backward had);
    8. addmm has a scale, or an addend that is not a bias.

    Convolutions and batched matmuls never match: the op is a plain matmul.

    `ops/linear_act.py` has the measured gain: rounding error, not time. A bfloat16 training step of 1024-4096-1024 on
    2048 rows, v5e compiler, cycles without and with: GELU 991,684 and 993,518 (a bfloat16 bias is upcast), gated SiLU
    1,004,675 both; SiLU 957,876 and 993,518, because the partitioner then saves another value of the same size, in
    three dimensions, which the compiler schedules less well. The new nodes carry the metadata of the matmul, so that
    `keep_float32` by module path still applies.
    """

    name: ClassVar[str] = "fuse_linear_activation"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        forward = forward_nodes(gm.graph)

        def rewrite(found: Match) -> None:
            forward.update(_rewrite(gm.graph, found))

        matmuls = (node for node in calls(gm.graph, *LINEAR_MATMULS) if node in forward)
        return rewrite_each(self.name, matmuls, lambda matmul: _match(linear_at(matmul, forward), forward), rewrite)


@dataclass(frozen=True)
class Match:
    """A Linear that becomes `kp::linear_act`.

    Attributes:
        activation: Its name in `kp::linear_act`.
        root: The node that the op's result replaces.
        inside: The nodes from the matmul to `root`, without `root`.
        multiplier: The gate, [M, N], or None.
    """

    linear: Linear
    activation: str
    root: fx.Node
    inside: frozenset[fx.Node]
    multiplier: fx.Node | None = None

    @property
    def is_saved(self) -> bool:
        """Whether other nodes (a backward) still read a value that the op replaces."""
        return any(user not in self.inside and user is not self.root for node in self.inside for user in node.users)

    def grown(self, root: fx.Node, multiplier: fx.Node | None) -> Match:
        return Match(self.linear, self.activation, root, self.inside | {self.root}, multiplier)


def _match(linear: Linear, forward: set[fx.Node]) -> Match | Refusal | None:
    """The largest activation that can be fused; a refusal says what is wrong with the largest one."""
    refusal = None
    for root, name, between in activations_of(linear.value, forward, fake_of(linear.input).dtype):
        match = Match(linear, name, root, frozenset(between) | set(linear.chain))
        problem = linear.problem or _conflict(match, forward)
        if problem is None:
            return _extended(match, forward)
        refusal = refusal or Refusal(linear.chain[0], problem)
    return refusal


def _conflict(match: Match, forward: set[fx.Node]) -> str | None:
    """What else reads a value that the op replaces, or None if the op saves what is read."""
    for node in sorted(match.inside):
        for user in sorted(set(node.users) - match.inside - {match.root}):
            if user.op == "output":
                return f"{node.name}, before the activation, is an output of the graph"
            if user in forward:
                return f"{node.name}, before the activation, is also read by {user.name}"
            if node in match.linear.unbiased:
                return f"the backward reads {node.name}, the matmul without its bias"
    return None


def _extended(match: Match, forward: set[fx.Node]) -> Match:
    """The match with the gate and the cast that follow it, if any. A cast that rounds is the last node."""
    while not rounds(match.root, match.linear.dtype) and (user := only_user(match.root, forward)):
        gate = _gate(user, match) if match.multiplier is None else None
        is_last_cast = is_any_cast(user, match.linear.dtype) and len(match.root.users) == 1
        if gate is None and not is_last_cast:
            break
        match = match.grown(user, gate or match.multiplier)
    return match


def _gate(user: fx.Node, match: Match) -> fx.Node | None:
    """The other operand of a multiplication with the activation, as [M, N]."""
    others = [other for other in user.args if other is not match.root]
    shape = fake_of(match.root).shape
    if user.target != aten.mul.Tensor or len(others) != 1 or not has_shape(others[0], tuple(shape)):
        return None
    gate, size = others[0], tuple(fake_of(match.linear.chain[0]).shape)
    if isinstance(gate, fx.Node) and gate.target in RESHAPES and not has_shape(gate, size):
        gate = gate.args[0]
    is_gate = isinstance(gate, fx.Node) and has_shape(gate, size) and fits(fake_of(gate).dtype, match.linear.dtype)
    return gate if is_gate else None  # type: ignore[return-value]


def _rewrite(graph: fx.Graph, match: Match) -> set[fx.Node]:
    """Insert the op and return the new nodes that the forward needs."""
    linear, before, is_saved = match.linear, match.linear.chain[0].prev, match.is_saved
    dtype = fake_of(match.root).dtype
    options = {"multiplier": match.multiplier, "out_dtype": dtype if dtype != linear.dtype else None}
    options = {key: value for key, value in options.items() if value is not None}
    arguments = (linear.input, linear.weight, linear.bias, match.activation)
    insert = partial(insert_call, graph, like=linear.chain[0])
    with graph.inserting_before(match.root):
        if is_saved:
            both = insert(kp.linear_act_train.default, arguments, options)
            result, pre = insert(operator.getitem, (both, 0), {}), insert(operator.getitem, (both, 1), {})
            pre = _viewed(insert, pre, linear.chain[: linear.chain.index(linear.biased) + 1])
            linear.biased.replace_all_uses_with(pre)
            made = {both, result}
        else:
            result = pre = insert(kp.linear_act.default, arguments, options)
            made = {result}
        viewed = _viewed(insert, result, linear.chain)
    match.root.replace_all_uses_with(viewed)
    last = match.root.prev
    _erase_unused(graph, match)
    if is_saved:
        _move_readers(before.next, pre, last)
    return made | {viewed}


def _erase_unused(graph: fx.Graph, match: Match) -> None:
    replaced = match.inside | {match.root}
    views = {source for node in replaced for source in node.all_input_nodes if source.target in RESHAPES}  # the gate's
    for node in sorted(replaced | views, reverse=True):
        if not node.users:
            graph.erase_node(node)


def _move_readers(node: fx.Node, pre: fx.Node, last: fx.Node) -> None:
    """Move the nodes between `node` and `pre` that read the new pre-activation after it."""
    late: set[fx.Node] = set()
    while node is not pre:
        following = node.next
        if any(source is pre or source in late for source in node.all_input_nodes):
            late.add(node)
            last.append(node)
            last = node
        node = following


def _viewed(insert: Callable[..., fx.Node], node: fx.Node, chain: tuple[fx.Node, ...]) -> fx.Node:
    """`node`, [M, N], in the shape of the last view of `chain`."""
    views = [view for view in chain if view.target in RESHAPES]
    return insert(aten.view.default, (node, views[-1].args[1]), {}) if views else node
