"""The pass `mask_padding`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx

from kp_dynamo.graph.editing import replace_node
from kp_dynamo.graph.nodes import PADDED_SIZES, calls
from kp_dynamo.passes.base import PassReport
from kp_dynamo.passes.padding.atoms import Padded, Refused, plain
from kp_dynamo.passes.padding.interpreter import PaddingInterpreter, RefusedNode
from kp_dynamo.passes.padding.layout import with_one_atom
from kp_dynamo.passes.padding.masks import Masks

_DONE = "kp_mask_padding"


@dataclass(frozen=True)
class MaskPadding:
    """Make a graph correct at padded sizes: ops that mix along a padded dimension see no padding.

    Before, for `x: f32[2, s]` and the true length `n: i64[]` (an input that nothing uses yet):

        softmax: f32[2, s] = aten._softmax(x, 1, False)

    After:

        is_true: b8[s] = aten.lt(aten.arange(s), n)
        where: f32[2, s] = aten.where(aten.view(is_true, [1, s]), x, -inf)
        softmax: f32[2, s] = aten._softmax(where, 1, False)

    Every symbolic size now is a padded size; the inputs `n` are the true lengths. The padding of a value is arbitrary
    and may be NaN. Pointwise operators run unchanged. For operators that mix along the padded dimension, the padding is
    replaced by a neutral value. Operators that count from the end, or use the length as a value, take the true length.
    So one program serves every length up to its sizes.

    1. Each operator has a rule (`padding/`), is pointwise, or is decomposed by torch's own decomposition.
    2. An operator without a rule, or whose rule raises, is refused: the reason names the missing rule, and the graph
       stays unchanged.
    3. If the true elements of a result are not the first ones (`view(B * s)`), the result is reordered.

    Source: the definitions of the operators; masked keys as in Vaswani et al., "Attention Is All You Need" (2017),
    3.2.3.

    Attributes:
        symbols: Names of the symbolic lengths. The graph's last inputs that are not tangents are their true values, in
            this order: 0-dim int64 tensors.
    """

    symbols: tuple[str, ...]
    name: ClassVar[str] = "mask_padding"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        if gm.meta.get(_DONE) == self.symbols:
            return PassReport(self.name, 0)
        try:
            traced, masks = self._traced(gm)
        except RefusedNode as refused:
            return PassReport(self.name, 0, ((refused.node.name, refused.reason),))
        _take_over(gm, traced)
        _read_constants(gm.graph)
        gm.meta[_DONE], gm.meta[PADDED_SIZES] = self.symbols, frozenset(masks.noted)
        return PassReport(self.name, max(1, masks.num_masked), notes=(f"{masks.num_masked} tails masked",))

    def _traced(self, gm: fx.GraphModule) -> tuple[fx.GraphModule, Masks]:
        inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
        primals = [n for n in inputs if not str(n.target).startswith("tangents_")]
        lengths = primals[len(primals) - len(self.symbols) :]
        _require_known(inputs, self.symbols)
        made: list[Masks] = []

        def run(*values: Any) -> Any:
            given = dict(zip(inputs, values, strict=True))
            true = {symbol_named(s, inputs): given[n] for s, n in zip(self.symbols, lengths, strict=True)}
            masks = Masks(true, _sizes(values))
            made.append(masks)
            padded = [_input(v) if isinstance(v, torch.Tensor) else v for v in values]
            for value in padded:
                if isinstance(value, Padded):
                    masks.note(value)
            results = PaddingInterpreter(gm, masks).run(*padded, enable_io_processing=False)
            output = next(n for n in gm.graph.nodes if n.op == "output")
            return [_in_order(masks, r, output) for r in results]

        values = [n.meta["val"] for n in inputs]
        mode = detect_fake_mode(values)
        assert mode is not None, "a joint or inference graph has fake tensors"
        with mode, enable_python_dispatcher(), fx.traceback.preserve_node_meta(), torch.no_grad():
            traced = make_fx(run)(*values)
        return traced, made[-1]


def _input(value: torch.Tensor) -> Padded:
    """A padded input; an expanded one becomes dense, even if its strides were 0 when Dynamo traced it."""
    is_expanded = any(isinstance(stride, int) and stride == 0 for stride in value.stride())
    return Padded(value.contiguous() if is_expanded else value, plain(value.shape))


def symbol_named(name: str, inputs: Sequence[fx.Node]) -> sympy.Symbol:
    """The symbol of that name among the sizes of the inputs; a new symbol if a guard has specialized the size."""
    for symbol in _symbols(inputs):
        if str(symbol) == name:
            return symbol
    return sympy.Symbol(name)


def _sizes(values: Sequence[Any]) -> dict[sympy.Symbol, torch.SymInt]:
    """Maps each symbol to the size of an input."""
    found: dict[sympy.Symbol, torch.SymInt] = {}
    for value in values:
        for size in value.shape if isinstance(value, torch.Tensor) else [value]:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                found.setdefault(size.node.expr, size)
    return found


def _symbols(inputs: Sequence[fx.Node]) -> set[sympy.Symbol]:
    found: set[sympy.Symbol] = set()
    for node in inputs:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else [value]
        for size in sizes:
            if isinstance(size, (torch.SymInt, torch.SymFloat)):
                found |= size.node.expr.free_symbols
    return found


def _require_known(inputs: Sequence[fx.Node], symbols: Sequence[str]) -> None:
    for node in inputs:
        unknown = {str(s) for s in _symbols([node])} - set(symbols)
        # Dynamo also passes the strides and storage offsets of inputs, which a functional graph does not use.
        if unknown and node.users:
            raise RefusedNode(
                node,
                f"the number {_user_names(node, unknown)} varies and is not a padded size. Try: pass it as a "
                "tensor and use it in a mask or an index (torch.where, x.scatter)",
            )


def _user_names(node: fx.Node, names: set[str]) -> str:
    """The numbers by their names in the user's code, if Dynamo knows them: "start", "self.step"."""
    value = node.meta.get("val")
    sources = getattr(getattr(getattr(value, "node", None), "shape_env", None), "var_to_sources", {})
    found = {str(symbol): known[0].name() for symbol, known in sources.items() if known}
    return ", ".join(re.sub(r"L\['(\w+)'\]", r"\1", found.get(name, name)) for name in sorted(names))


def _in_order(masks: Masks, result: Any, output: fx.Node) -> Any:
    """A result with its true elements first in every dimension."""
    if not isinstance(result, Padded):
        return result
    try:
        for d in range(len(result.dims)):
            result = with_one_atom(masks, result, d)
    except Refused as refused:
        raise RefusedNode(output, str(refused)) from None
    return result.tensor


def _read_constants(graph: fx.Graph) -> None:
    """Read the attributes that `fold_constants` left in the graph directly instead of their copies."""
    for copy in calls(graph, torch.ops.aten.lift_fresh_copy.default):
        source = copy.args[0]
        if isinstance(source, fx.Node) and source.op == "get_attr":
            source.meta = dict(copy.meta)
            replace_node(copy, by=source)


def _take_over(gm: fx.GraphModule, traced: fx.GraphModule) -> None:
    """Replace the graph of `gm` by the traced one; inputs keep their names and values, which partitioners rely on."""
    old = [n for n in gm.graph.nodes if n.op == "placeholder"]
    new = [n for n in traced.graph.nodes if n.op == "placeholder"]
    for before, after in zip(old, new, strict=True):
        after.name, after.target = before.name, before.target
        after.meta = dict(before.meta)
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            setattr(gm, str(node.target), getattr(traced, str(node.target)))
    output_before = next(n for n in gm.graph.nodes if n.op == "output")
    output_after = next(n for n in traced.graph.nodes if n.op == "output")
    output_after.meta = dict(output_before.meta)
    gm.graph = traced.graph
