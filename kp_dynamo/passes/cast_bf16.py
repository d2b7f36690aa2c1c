"""The pass `cast_bf16`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from kp_dynamo.graph.editing import insert_call
from kp_dynamo.graph.nodes import gradients_by_position, tensor_of
from kp_dynamo.graph.op_tables import BIASES, LINEAR_ACTS, MATMULS, MOVES, PARTS, UNBIASED, VIEWS, users_through
from kp_dynamo.passes.base import PassReport, Refusal, reported
from kp_dynamo.passes.precision.cast_nodes import is_downcast, is_float32, is_upcast
from kp_dynamo.passes.precision.casts import Casts
from kp_dynamo.passes.precision.keep_float32 import KeepFloat32
from kp_dynamo.passes.precision.matmul_rules import PrecisionRules, float32_matmuls, keeps_result, linear_matmuls
from kp_dynamo.passes.precision.sensitive_ops import may_follow
from kp_dynamo.passes.precision.unscaling import Unscaling

aten = torch.ops.aten

Scope = Literal["linear", "matmul", "all"]
Form = Literal["narrow", "wide"]


@dataclass(frozen=True)
class CastBf16:
    """Compute matmuls in bfloat16: changes numerics, by rounding their operands and some of their results.

        before                                               after
        addmm: f32[6, 8] = aten.addmm.default(b, x, w)       _to_copy: bf16[6, 4] = aten._to_copy.default(x, dtype=bf16)
                                                             (the same of w and b)
                                                             addmm: bf16[6, 8] = aten.addmm.default(...)
                                                             _to_copy_3: f32[6, 8] = aten._to_copy.default(addmm, ...)

    Graph inputs (master weights), outputs and gradients keep their dtype, and so does every value that is not float32.
    The scope decides which matmuls, forward or backward, are cast:

    1. "linear": those of a Linear (see `linear_matmuls`);
    2. "matmul": each op of `MATMULS` (`graph/op_tables.py`): matmuls, convolutions and their backward, and the kp
       operators that earlier passes made of matmuls, such as kp::attention;
    3. "all": the same, and the ops after them. A pointwise op or a move off the sensitive list (`sensitive_ops.py`)
       runs in bfloat16 if matmuls in bfloat16 produce all of its float32 operands. So bfloat16 spreads from matmuls and
       never reaches masks, positions, tables and residual streams. An op keeps float32 if it has a number that bfloat16
       does not represent exactly (1.702, a mask's -3.4e38), or if the graph returns its result.

    A matmul in scope takes one of two forms. Narrow: operands and result are bfloat16, and float32 readers read an
    upcast of the result. Wide: operands are rounded and upcast again, and the result is the float32 value that the MXU
    accumulates. The wide form is used if rounding the result would cost accuracy and save no memory (see
    `keeps_result`). kp::linear_act always has a float32 result.

    If a bfloat16 operand of mm or bmm is multiplied by a number, the multiplication moves after the matmul, unless the
    number is a power of two: attention scales queries and keys, and scaling in bfloat16 would round them once more.

    Each value is cast once, before its views (`casts.py`). An upcast followed by the same downcast cancels, including
    the user's own casts.

    Refuses, with the reason: nodes that `keep_float32` names; matmuls of positions and other values computed from
    integers; matmuls whose result is an angle. These stay in float32, as do matmuls whose operands a user has upcast.

    Error, over 15 models of transformers and timm, outputs and all gradients: 0.84 to 1.09 times that of
    torch.autocast("cpu", torch.bfloat16) against float64.

    Attributes:
        scope: Which ops may run in bfloat16.
        keep_float32: ATen op names and globs of module paths that stay in float32, see `keep_float32.py`.
        reduced: Positions of the arguments whose gradients several devices sum in bfloat16. Those that a matmul in
            scope computes, and that nothing else reads, take the narrow form.
        rounds_sums: Whether several devices sum the results of matmuls in bfloat16. Those that are added to something
            take the narrow form, as in autocast.
    """

    scope: Scope = "matmul"
    keep_float32: tuple[str, ...] = ()
    reduced: tuple[int, ...] = ()
    rounds_sums: bool = False

    name: ClassVar[str] = "cast_bf16"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        unused = {node for node in gm.graph.nodes if not node.users}
        reduced = {g for position, g in gradients_by_position(gm.graph).items() if position in self.reduced}
        casting = _Casting(gm.graph, self.scope, KeepFloat32(self.keep_float32), reduced, self.rounds_sums)
        for node in list(gm.graph.nodes):
            casting.visit(node)
        for node in reversed(gm.graph.nodes):
            if not (node.users or node in unused or node.is_impure()):
                gm.graph.erase_node(node)
        return PassReport(self.name, casting.num_cast + casting.casts.num_removed, reported(casting.refused))


class _Casting:
    """One walk over a graph, in order: the operands of a node have their final dtype when it is visited."""

    def __init__(
        self, graph: fx.Graph, scope: Scope, keep: KeepFloat32, reduced: set[fx.Node], rounds_sums: bool
    ) -> None:
        self.scope, self.keep, self.reduced, self.rounds_sums = scope, keep, reduced, rounds_sums
        self.casts = Casts(graph)
        self.unscaling = Unscaling(self.casts)
        self.num_cast = 0
        self.refused: list[Refusal] = []
        self.forms: dict[fx.Node, Form] = {}
        self._plan(graph)

    def _plan(self, graph: fx.Graph) -> None:
        rules = PrecisionRules.of(graph)
        in_scope = linear_matmuls(graph) if self.scope == "linear" else None
        for matmul in float32_matmuls(graph):
            found = self._form_of(matmul, rules) if in_scope is None or matmul in in_scope else None
            if isinstance(found, Refusal):
                self.refused.append(found)
            elif found is not None:
                self.forms[matmul] = found

    def _form_of(self, matmul: fx.Node, rules: PrecisionRules) -> Form | Refusal:
        if problem := self.keep.reason(matmul) or rules.problem(matmul):
            return Refusal(matmul, problem)
        return "wide" if keeps_result(matmul, self.reduced, rounds_sums=self.rounds_sums) else "narrow"

    def visit(self, node: fx.Node) -> None:
        if is_upcast(node) or is_downcast(node):
            self.casts.register_cast(node)
        elif node in self.forms:
            self._cast_matmul(node)
        elif self.scope == "all" and _may_follow(node, self.casts):
            self._follow(node)

    def _cast_matmul(self, node: fx.Node) -> None:
        is_wide, args, factor = self.forms[node] == "wide", list(node.args), 1.0
        for position in MATMULS[node.target]:
            operand: Any = args[position]
            if node.target in UNBIASED:
                args[position], scale = self.unscaling.unscaled(operand, before=node)
                factor *= scale
            else:
                args[position] = self.casts.narrow(operand, before=node)
            if is_wide:
                args[position] = self.casts.upcast(args[position], before=node)  # type: ignore[arg-type]
        bias = BIASES.get(node.target)
        if bias is not None and not is_wide and isinstance(args[bias], fx.Node):
            args[bias] = self.casts.narrow(args[bias], before=node)  # type: ignore[arg-type]
        if node.target in LINEAR_ACTS:
            self._cast_multiplier(node)
        elif node.target is torch.ops.kp.linear_cross_entropy_backward.default:
            node.kwargs = {"out_dtype": torch.float32}
        node.args = tuple(args)
        _scale(self.casts.narrow_result(node), factor)
        self.num_cast += 1

    def _cast_multiplier(self, node: fx.Node) -> None:
        """Keep the result in float32, and read the gate in bfloat16 if that is exact; the bias may stay in float32."""
        gate = node.kwargs.get("multiplier")
        if isinstance(gate, fx.Node) and is_float32(gate) and self.casts.is_exact(gate):
            gate = self.casts.narrow(gate, before=node)
        dtype = node.kwargs.get("out_dtype") or torch.float32
        node.kwargs = {**node.kwargs, **({"multiplier": gate} if gate else {}), "out_dtype": dtype}

    def _follow(self, node: fx.Node) -> None:
        if kept := self.keep.reason(node):
            self.refused.append(Refusal(node, kept))
            return
        sources = {s: self.casts.narrow(s, before=node) for s in node.all_input_nodes if is_float32(s)}
        node.args, node.kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda s: sources.get(s, s))
        self.casts.narrow_result(node)
        self.num_cast += 1


def _scale(node: fx.Node, factor: float) -> None:
    """Make the users of a float32 node read a multiple of it."""
    if factor == 1:
        return
    with node.graph.inserting_after(node):
        scaled = insert_call(node.graph, aten.mul.Scalar, (node, factor), {}, like=node)
    node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)


def _may_follow(node: fx.Node, casts: Casts) -> bool:
    """Whether running an op in bfloat16 only rounds its float32 result, and a reader benefits from it."""
    sources = [source for source in node.all_input_nodes if tensor_of(source) is not None]
    floats = [source for source in sources if is_float32(source)]
    if not floats or not may_follow(node.target) or "dtype" in node.kwargs or not _gives_float32(node):
        return False
    if not all(casts.produced_in_bf16(source) for source in floats) or not _fits(node, sources):
        return False
    return not any(user.op == "output" for user in users_through(node, VIEWS + PARTS))


def _gives_float32(node: fx.Node) -> bool:
    value = node.meta["val"]
    first = value[0] if isinstance(value, (list, tuple)) else value
    return isinstance(first, torch.Tensor) and first.dtype == torch.float32


def _fits(node: fx.Node, sources: list[fx.Node]) -> bool:
    """Whether bfloat16 represents all numbers of `node`, and its operands of other dtypes are masks or indices."""
    is_move = node.target in MOVES
    allowed = (torch.float32, torch.bool, *((torch.int64, torch.int32) if is_move else ()))
    numbers = [n for n in (*node.args, *node.kwargs.values()) if isinstance(n, float if is_move else (int, float))]
    return all(tensor_of(s).dtype in allowed for s in sources) and all(_is_bfloat16(n) for n in numbers)  # type: ignore[union-attr]


def _is_bfloat16(number: float) -> bool:
    """Whether bfloat16, with its 8 significant bits, represents a number exactly."""
    if not math.isfinite(number):
        return True
    mantissa, exponent = math.frexp(number)
    return (mantissa * 256).is_integer() and -125 <= exponent <= 128
