"""The pass `mask_padding`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx

from kp_dynamo.graph.editing import replace_node
from kp_dynamo.graph.nodes import PADDED_SIZES, calls, primal_inputs
from kp_dynamo.passes.base import PassReport, Refusal, reported
from kp_dynamo.passes.padding.atoms import Padded, Refused, plain
from kp_dynamo.passes.padding.interpreter import PaddingInterpreter
from kp_dynamo.passes.padding.layout import with_one_atom
from kp_dynamo.passes.padding.masks import Masks
from kp_dynamo.passes.padding.symbols import sizes_of, symbol_named, varying_number

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
        found = self._traced(gm)
        if isinstance(found, Refusal):
            return PassReport(self.name, 0, reported([found]))
        traced, masks = found
        _take_over(gm, traced)
        _read_constants(gm.graph)
        gm.meta[_DONE], gm.meta[PADDED_SIZES] = self.symbols, frozenset(masks.noted)
        return PassReport(self.name, max(1, masks.num_masked), notes=(f"{masks.num_masked} tails masked",))

    def _traced(self, gm: fx.GraphModule) -> tuple[fx.GraphModule, Masks] | Refusal:
        inputs, primals = gm.graph.find_nodes(op="placeholder"), primal_inputs(gm.graph)
        lengths = primals[len(primals) - len(self.symbols) :]
        if unknown := varying_number(inputs, self.symbols):
            return unknown
        made: list[Masks] = []

        def run(*values: Any) -> Any:
            given = dict(zip(inputs, values, strict=True))
            true = {symbol_named(s, inputs): given[n] for s, n in zip(self.symbols, lengths, strict=True)}
            masks = Masks(true, sizes_of(values))
            made.append(masks)
            padded = [_input(v) if isinstance(v, torch.Tensor) else v for v in values]
            for value in padded:
                if isinstance(value, Padded):
                    masks.note(value)
            results = PaddingInterpreter(gm, masks).run(*padded, enable_io_processing=False)
            return [_in_order(masks, r, gm.graph.output_node()) for r in results]

        values = [n.meta["val"] for n in inputs]
        mode = detect_fake_mode(values)
        assert mode is not None, "a joint or inference graph has fake tensors"
        try:
            with mode, enable_python_dispatcher(), fx.traceback.preserve_node_meta(), torch.no_grad():
                return make_fx(run)(*values), made[-1]
        except Refused as refused:
            return refused.refusal


def _input(value: torch.Tensor) -> Padded:
    """A padded input; an expanded one becomes dense, even if its strides were 0 when Dynamo traced it."""
    is_expanded = any(isinstance(stride, int) and stride == 0 for stride in value.stride())
    return Padded(value.contiguous() if is_expanded else value, plain(value.shape))


def _in_order(masks: Masks, result: Any, output: fx.Node) -> Any:
    """A result with its true elements first in every dimension."""
    if not isinstance(result, Padded):
        return result
    try:
        for d in range(len(result.dims)):
            result = with_one_atom(masks, result, d)
    except Refused as refused:
        raise Refused(refused.reason, output) from None
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
    for before, after in zip(*(g.find_nodes(op="placeholder") for g in (gm.graph, traced.graph)), strict=True):
        after.name, after.target = before.name, before.target
        after.meta = dict(before.meta)
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            setattr(gm, str(node.target), getattr(traced, str(node.target)))
    traced.graph.output_node().meta = dict(gm.graph.output_node().meta)
    gm.graph = traced.graph
