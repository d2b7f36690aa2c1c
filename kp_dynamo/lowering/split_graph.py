"""Split a graph around the operators that run on the CPU.

Every node gets a stage. XLA runs the even stages, the CPU runs the odd ones, and a node goes into the first stage of
its kind at which all its inputs exist. A stage is one program, so there are few programs: not one for each split.
User-defined and random operators on the CPU run in the order of the model, because each may depend on the one before.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from kp_dynamo.compat import xla
from kp_dynamo.exceptions import XLACompilationError
from kp_dynamo.graph.source_lines import source_line
from kp_dynamo.graph.symbol_values import SymbolReader
from kp_dynamo.graph.unrepeatable import is_unrepeatable
from kp_dynamo.lowering.base import LoweringSpec
from kp_dynamo.lowering.constants import device_constants
from kp_dynamo.lowering.host_layout import strides_of, to_host
from kp_dynamo.lowering.pending import run_pending
from kp_dynamo.lowering.program import compile_program
from kp_dynamo.lowering.program_run import Run
from kp_dynamo.ops.at_true_sizes import name_of
from kp_dynamo.telemetry.counters import TELEMETRY
from kp_dynamo.telemetry.stages import stage


def cut_around(gm: fx.GraphModule, on_cpu: set[fx.Node], spec: LoweringSpec) -> Pieces:
    """Split `gm` so that the nodes `on_cpu` run on the CPU and all others in XLA programs."""
    return Pieces(split_around(gm, on_cpu), spec)


def split_around(gm: fx.GraphModule, on_cpu: set[fx.Node]) -> fx.GraphModule:
    """A graph that calls the pieces of `gm`; see `is_xla_piece`."""
    stages = _stages(gm.graph, on_cpu)
    split: fx.GraphModule = split_module(gm, None, stages.__getitem__, keep_original_order=False)  # type: ignore[arg-type]
    return split


def spec_of_pieces(spec: LoweringSpec) -> LoweringSpec:
    """The spec for the pieces of a split graph.

    A piece may pass on an argument of the whole graph, so all its results count as returned. Another piece may read the
    argument later, so nothing is donated. The results of a piece are not those of the graph, so none is pinned.
    """
    return replace(spec, num_returned=sys.maxsize, donate=False, result_shardings=(), is_portable=False)


def _stages(graph: fx.Graph, on_cpu: set[fx.Node]) -> dict[fx.Node, int]:
    stages: dict[fx.Node, int] = {}
    last = 0  # the stage of the last unrepeatable node
    for node in graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        is_ordered = node in on_cpu and is_unrepeatable(node)
        earliest = max((stages.get(source, 0) for source in node.all_input_nodes), default=0)
        earliest = max(earliest, last) if is_ordered else earliest
        stages[node] = earliest + (earliest % 2 != (node in on_cpu))
        last = stages[node] if is_ordered else last
        for source in node.all_input_nodes:
            # A multi-result CPU operator and its getitem nodes share a stage: only tensors pass between stages.
            if source in on_cpu and _is_getitem(node):
                stages[node] = stages[source]
    return stages


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


class Pieces:
    """Runs the pieces of a split graph. Each XLA piece is compiled at its first run, for the shapes of that run.

    These shapes follow from the ones that the whole graph was compiled for.
    """

    def __init__(self, whole: fx.GraphModule, spec: LoweringSpec) -> None:
        self._whole = whole
        self._spec, self._num_returned = spec_of_pieces(spec), spec.num_returned
        self._runs: dict[str, Run] = {}
        self.num_programs = sum(is_xla_piece(node) for node in whole.graph.nodes)
        self.seconds: dict[str, float] = {}
        self.moved_bytes: Counter[tuple[str, str]] = Counter()

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        results = SplitGraphInterpreter(self._whole, self._run_piece).run(*args)
        flat = list(results) if isinstance(results, (list, tuple)) else [results]
        # If the caller copies a result over an argument, it overwrites every other result that is this argument. So
        # returned results are never arguments, and results saved for the backward are no overwritten ones.
        own = {id(a) for a in args if isinstance(a, torch.Tensor)}
        written = {id(args[number]) for number in self._spec.overwritten if number is not None}
        apart = [r.clone() if id(r) in (own if i < self._num_returned else written) else r for i, r in enumerate(flat)]
        return [r.to(xla.device()) if isinstance(r, torch.Tensor) else r for r in apart]

    def _run_piece(self, node: fx.Node, piece: fx.GraphModule, args: Sequence[Any]) -> Any:
        if not is_xla_piece(node):
            return self._on_cpu(piece, args)
        if node.name not in self._runs:
            spec = replace(self._spec, identity=f"{self._spec.identity} {node.name}")
            with stage(f"compile a piece of a {spec.name}"):
                run, missing, seconds, *_ = compile_program(piece, args, device_constants(piece), spec)
            if run is None:
                raise XLACompilationError(f"XLA lowered {missing[0].target} in a graph, but not in a piece of it")
            self._runs[node.name] = run
            self._count_seconds(seconds)
        results = self._runs[node.name](args)
        returned = piece.graph.output_node().args[0]
        return results if isinstance(returned, (list, tuple)) else results[0]

    def _count_seconds(self, seconds: dict[str, float]) -> None:
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value
            TELEMETRY.spent(name, value)

    def _on_cpu(self, piece: fx.GraphModule, args: Sequence[Any]) -> Any:
        """Run a piece on the CPU. Its results stay there, because programs take CPU tensors with plain values."""
        with torch.no_grad():
            result = piece(*_as_traced(piece, args))
            # Programs need plain values: `imag` of a `conj` is a view with a pending negation.
            result = torch.utils._pytree.tree_map_only(torch.Tensor, _resolved, result)
        moved = _num_bytes(args) + _num_bytes(result)
        for node in piece.graph.nodes:
            if node.op == "call_function" and not _is_getitem(node):
                TELEMETRY.count_fallback(name_of(node), moved)
                self.moved_bytes[name_of(node), source_line(node)] += moved
                moved = 0
        return result


def _as_traced(piece: fx.GraphModule, args: Sequence[Any]) -> list[Any]:
    """The arguments on the CPU, with autograd's strides: they show whether an LU is of a matrix or its transpose."""
    inputs = [node.meta.get("val") for node in piece.graph.find_nodes(op="placeholder")]
    values = SymbolReader(inputs, has_strides=False).read(args)
    run_pending([a for a in args if isinstance(a, torch.Tensor) and a.device.type == "xla"])
    every = zip(args, (strides_of(value, values) for value in inputs), strict=True)
    return to_host(args, [strides if _is_dense(arg, strides) else None for arg, strides in every])


def _is_dense(arg: Any, strides: tuple[int, ...] | None) -> bool:
    """Whether no two elements share memory: torch 2.9 gives stride 0 for a slice_scatter into an expanded tensor."""
    if strides is None or not isinstance(arg, torch.Tensor):
        return False
    step = 1
    for found, size in sorted(zip(strides, arg.shape, strict=True)):
        if size > 1 and found != step:
            return False
        step *= size
    return True


class SplitGraphInterpreter(fx.Interpreter):
    """Runs a split graph, and calls `run_piece(node, piece, args)` for each piece."""

    def __init__(self, whole: fx.GraphModule, run_piece: Any) -> None:
        super().__init__(whole)
        self._run_piece = run_piece

    def run_node(self, node: fx.Node) -> Any:
        if node.op != "call_module":
            return super().run_node(node)
        args, _ = self.fetch_args_kwargs_from_env(node)
        return self._run_piece(node, self.fetch_attr(str(node.target)), args)


def is_xla_piece(node: fx.Node) -> bool:
    """Whether XLA runs a piece. split_module names pieces after their stages: submod_0, submod_1, ..."""
    return node.op == "call_module" and int(str(node.target).rsplit("_", 1)[1]) % 2 == 0


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg()


def _num_bytes(tree: Any) -> int:
    tensors = [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)
