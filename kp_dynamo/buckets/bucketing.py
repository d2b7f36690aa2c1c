"""At run time: pad inputs to a bucket, pass the true lengths to the program, slice the results.

This happens between Dynamo and AOTAutograd, so that everything below, backward included, sees only padded sizes.
Padding and slicing run on the host, which compiles nothing: on the device, each length would be a small program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource

from kp_dynamo.autograd.result_aliases import ResultAliases
from kp_dynamo.buckets.length_plan import LengthPlan, LengthPlanner
from kp_dynamo.buckets.marking import warn_static_dims
from kp_dynamo.buckets.padded_arguments import PaddedArguments
from kp_dynamo.buckets.refusals import REMEDY, refuse_graph
from kp_dynamo.buckets.resizing import Resize, resized
from kp_dynamo.buckets.sizes import Buckets
from kp_dynamo.buckets.symbolic_sizes import Shape, example_value
from kp_dynamo.cache.lru import LRUCache
from kp_dynamo.capture.capture import Capture
from kp_dynamo.exceptions import TPUOptimizationError
from kp_dynamo.graph.nodes import PADDED_SIZES
from kp_dynamo.graph.source_lines import user_line
from kp_dynamo.passes.base import GraphPass, PassReport

MASKS = "mask_padding"
_UNMASKED = f"disable_passes names {MASKS}, without which padding would change results"
_MAX_PLANS = 4096  # a few hundred bytes each


class Bucketing:
    """The padded form of one capture.

    A piece of a divided graph gets padded values and returns padded values: their true elements come first, and the
    padding is arbitrary. Only the whole graph pads and slices.

    Attributes:
        symbols: Names of the symbolic lengths, in the order of their inputs.
        is_refused: Whether the graph could not be made correct at padded sizes; then nothing is padded.
    """

    def __init__(
        self, gm: fx.GraphModule, buckets: Buckets, *, poisons: bool, strict: bool, is_piece: bool = False
    ) -> None:
        self._inputs = [example_value(n) for n in gm.graph.nodes if n.op == "placeholder"]
        results = [example_value(n) for n in gm.graph.output_node().args[0]]  # type: ignore[union-attr]
        self._planner = LengthPlanner(self._inputs, results, buckets, strict=strict)
        self._poisons, self._strict, self._is_piece = poisons, strict, is_piece
        self.symbols = tuple(map(str, self._planner.places))
        self.is_refused = False
        self._plans: LRUCache[tuple[int, ...], LengthPlan] = LRUCache(_MAX_PLANS)
        self._arguments: PaddedArguments | None = None
        # The graph may track gradients where its caller does not: `with torch.enable_grad()` under `no_grad`.
        self._enables_grad = any(n.target is torch._C._set_grad_enabled and n.args[0] for n in gm.graph.nodes)

    def with_lengths(self, values: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        """The arguments of a call with the true lengths after them."""
        return None if values is None else (*values, *map(_length, self._planner.lengths_of(values)))

    def wrap(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `run`, which takes padded inputs and true lengths, in Dynamo's calling convention."""

        def run_bucketed(*args: Any) -> list[Any]:
            lengths = self._planner.lengths_of(args)
            plan = self._plans.get(lengths)
            if plan is None:
                plan = self._plan(lengths)
                self._plans.set(lengths, plan)
            if not plan.inputs:
                return list(run(*args, *map(_length, plan.lengths)))
            arguments = self._arguments
            if arguments is None:
                return self._run_padded(run, args, plan)[1]
            with arguments.checked(args):
                padded, results = self._run_padded(run, args, plan)
                arguments.write_back(args, padded, results, self._resized)
            return results

        return run_bucketed

    def _run_padded(
        self, run: Callable[..., Any], args: Sequence[Any], plan: LengthPlan
    ) -> tuple[list[Any], list[Any]]:
        padded = list(args)
        for position, shape in plan.inputs:
            padded[position] = self._resized(padded[position], shape) if isinstance(shape, tuple) else shape
        results = list(run(*padded, *map(_length, plan.lengths)))
        for position, shape in plan.results:
            results[position] = self._resized(results[position], shape) if isinstance(shape, tuple) else shape
        return padded, results

    def allowed(self, pipeline: tuple[GraphPass, ...], aliases: ResultAliases) -> tuple[GraphPass, ...]:
        """`pipeline`, without the masking pass if results or in-place writes forbid padding.

        A pipeline without this pass, which the user can disable by name, forbids padding too.

        Args:
            pipeline: The passes.
            aliases: Results that share memory.

        Raises:
            TPUOptimizationError: Padding is forbidden, and `strict=True`.
        """
        reason = self._aliasing_reason(aliases)
        if reason is None and any(p.name == MASKS for p in pipeline):
            return pipeline
        reason = reason or _UNMASKED
        if self._strict:
            raise TPUOptimizationError(f"strict=True and the graph cannot be padded to a bucket: {reason}. {REMEDY}")
        self._refuse(reason)
        return tuple(p for p in pipeline if p.name != MASKS)

    def decide(self, reports: Sequence[PassReport], gm: fx.GraphModule) -> None:
        """Read from the reports of the passes whether the graph was made correct at padded sizes."""
        for name, reason in (refused for report in reports if report.name == MASKS for refused in report.refused):
            # A later pass may have replaced the node.
            node = next((n for n in gm.graph.nodes if n.name == name), None)
            where = name if node is None else f"{node.target}{user_line(node)}"
            # The user does not know an input's name in the graph.
            self._refuse(reason if node is not None and node.op == "placeholder" else f"{where}: {reason}")
        self._planner.needed_sizes = gm.meta.get(PADDED_SIZES, frozenset())

    def join(self, pieces: Sequence[Bucketing]) -> None:
        """Take over, for the whole graph, which sizes padding must not make smaller in its pieces."""
        self._planner.needed_sizes = frozenset().union(*(piece._planner.needed_sizes for piece in pieces))

    def _refuse(self, reason: str) -> None:
        self.is_refused = True
        if not self._is_piece:  # its graph is then compiled as a whole, which may be padded
            refuse_graph(reason)

    def _aliasing_reason(self, aliases: ResultAliases) -> str | None:
        """Why the graph that AOTAutograd is tracing cannot be padded; also records what it does to its arguments."""
        context = torch._guards.TracingContext.try_get()
        metadata: Any = context.fw_metadata if context is not None else None
        if metadata is None:
            return None
        self._arguments = PaddedArguments(metadata, aliases)
        if self._is_piece and self._arguments.taken:
            return "a result of the piece is one of its inputs, or a view of one"
        return self._arguments.reason_to_refuse(len(self._inputs) + len(self.symbols), self._may_be_padded)

    def _may_be_padded(self, number: int) -> bool:
        value = self._inputs[number] if number < len(self._inputs) else None
        return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)

    def _plan(self, lengths: tuple[int, ...]) -> LengthPlan:
        if self.is_refused:
            return self._planner.exact(lengths)
        taken = self._arguments.taken if self._arguments is not None else ()
        return self._planner.padded(lengths, taken)

    def _resized(self, tensor: torch.Tensor, shape: Shape) -> torch.Tensor:
        if tensor.requires_grad and (torch.is_grad_enabled() or self._enables_grad):
            with torch.enable_grad():
                return Resize.apply(tensor, shape, self._poisons)  # type: ignore[no-any-return, no-untyped-call]
        return resized(tensor, shape, poisons=self._poisons)


def bucketed(capture: Capture, buckets: Buckets, *, poisons: bool, strict: bool) -> tuple[Capture, Bucketing | None]:
    """The capture with the true lengths as extra inputs; the same capture and None if it has no symbolic size."""
    is_piece = capture.passed is not None
    bucketing = Bucketing(capture.gm, buckets, poisons=poisons, strict=strict, is_piece=is_piece)
    if not is_piece:
        warn_static_dims(capture.gm, capture.inputs)
    if not bucketing.symbols:
        return capture, None
    lengths = [_length(1) for _ in bucketing.symbols]
    gm = _with_inputs(capture.gm, [f"true_length_{number}" for number in range(len(lengths))])
    values = bucketing.with_lengths(capture.values)
    return replace(capture, gm=gm, inputs=[*capture.inputs, *lengths], values=values), bucketing


def _length(number: int) -> torch.Tensor:
    """An input of a graph: on the CPU, also if the user has set a default device."""
    return torch.tensor(number, device="cpu")


def _with_inputs(gm: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """A copy of Dynamo's graph with extra inputs that are not used yet; Dynamo keeps the original."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    last = [n for n in gm.graph.nodes if n.op == "placeholder"][-1]
    for node in gm.graph.nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
        # AOTAutograd reads the source of every input of Dynamo's graph.
        if node.op == "placeholder":
            new[node]._dynamo_source = node._dynamo_source
        if node is last:
            for name in names:
                graph.placeholder(name)._dynamo_source = ConstantSource(name)
    copy = fx.GraphModule(gm, graph)
    copy.meta.update(gm.meta)
    copy._param_name_to_source = getattr(gm, "_param_name_to_source", {})  # type: ignore[assignment]
    return copy
