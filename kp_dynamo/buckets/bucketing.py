"""At run time: pad inputs to a bucket, pass the true lengths to the program, slice the results.

This happens between Dynamo and AOTAutograd, so that everything below, backward included, sees only padded sizes.
Padding and slicing run on the host, which compiles nothing: on the device, each length would be a small program.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource

from kp_dynamo.autograd.result_aliases import ResultAliases
from kp_dynamo.buckets.padded_arguments import PaddedArguments
from kp_dynamo.buckets.resizing import Resize, Shape, resized
from kp_dynamo.buckets.sizes import Buckets
from kp_dynamo.cache.lru import LRUCache
from kp_dynamo.capture.capture import Capture
from kp_dynamo.exceptions import TPUOptimizationError, TPUValidationError
from kp_dynamo.graph.nodes import PADDED_SIZES
from kp_dynamo.graph.source_lines import user_line
from kp_dynamo.passes.base import GraphPass, PassReport
from kp_dynamo.telemetry.counters import TELEMETRY

logger = logging.getLogger(__name__)

MASKS = "mask_padding"
_REMEDY = "Try: rewrite that line, mask by hand and pass a fixed size, or remove the option buckets"
_warned: set[str] = set()
_MAX_PLANS = 4096  # of some hundred bytes each


@dataclass(frozen=True)
class _Plan:
    """For one combination of true lengths: shapes of the padded inputs, the lengths, shapes of the sliced results."""

    inputs: tuple[tuple[int, Shape | float], ...]
    lengths: tuple[int, ...]
    results: tuple[tuple[int, Shape | float], ...]


class Bucketing:
    """The padded form of one capture.

    Attributes:
        symbols: Names of the symbolic lengths, in the order of their inputs.
        is_refused: Whether the graph could not be made correct at padded sizes; then nothing is padded.
    """

    def __init__(self, gm: fx.GraphModule, buckets: Buckets, *, poisons: bool, strict: bool) -> None:
        self._inputs = [_example(n) for n in gm.graph.nodes if n.op == "placeholder"]
        output = next(n for n in gm.graph.nodes if n.op == "output")
        self._results = [_example(n) for n in output.args[0]]
        self._buckets, self._poisons, self._strict = buckets, poisons, strict
        self._where = _first_places(self._inputs)
        self.symbols = tuple(map(str, self._where))
        self.is_refused = False
        self._sizes: frozenset[sympy.Expr] = frozenset()
        self._plans: LRUCache[tuple[int, ...], _Plan] = LRUCache(_MAX_PLANS)
        self._arguments: PaddedArguments | None = None

    def wrap(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `run`, which takes padded inputs and true lengths, in Dynamo's calling convention."""

        def run_bucketed(*args: Any) -> list[Any]:
            lengths = tuple(int(args[i].shape[d]) for i, d in self._where.values())
            plan = self._plans.get(lengths)
            if plan is None:
                plan = self._plan(lengths)
                self._plans.set(lengths, plan)
            if not plan.inputs:
                return list(run(*args, *map(torch.tensor, plan.lengths)))
            arguments = self._arguments
            if arguments is None:
                return self._run_padded(run, args, plan)[1]
            with arguments.checked(args):
                padded, results = self._run_padded(run, args, plan)
                arguments.write_back(args, padded, results, self._resized)
            return results

        return run_bucketed

    def _run_padded(self, run: Callable[..., Any], args: Sequence[Any], plan: _Plan) -> tuple[list[Any], list[Any]]:
        padded = list(args)
        for position, shape in plan.inputs:
            padded[position] = self._resized(padded[position], shape) if isinstance(shape, tuple) else shape
        results = list(run(*padded, *map(torch.tensor, plan.lengths)))
        for position, shape in plan.results:
            results[position] = self._resized(results[position], shape) if isinstance(shape, tuple) else shape
        return padded, results

    def allowed(self, pipeline: tuple[GraphPass, ...], strict: bool, aliases: ResultAliases) -> tuple[GraphPass, ...]:
        """`pipeline`, without the masking pass if results or in-place writes forbid padding.

        Args:
            pipeline: The passes.
            strict: Raise if padding is forbidden.
            aliases: Results that share memory.

        Raises:
            TPUOptimizationError: Padding is forbidden, and `strict` is set.
        """
        reason = self._aliasing_reason(aliases)
        if reason is None:
            return pipeline
        if strict:
            raise TPUOptimizationError(f"strict=True and the graph cannot be padded to a bucket: {reason}. {_REMEDY}")
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
        self._sizes = gm.meta.get(PADDED_SIZES, frozenset())

    def _refuse(self, reason: str) -> None:
        self.is_refused = True
        TELEMETRY.count("bucket_refusals")
        _warn_once(f"a graph is compiled for each length, not padded to buckets: {reason}. {_REMEDY}")

    def _aliasing_reason(self, aliases: ResultAliases) -> str | None:
        """Why the graph that AOTAutograd is tracing cannot be padded; also records what it does to its arguments."""
        context = torch._guards.TracingContext.try_get()
        metadata: Any = context.fw_metadata if context is not None else None
        if metadata is None:
            return None
        self._arguments = PaddedArguments(metadata, aliases)
        return self._arguments.reason_to_refuse(len(self._inputs) + len(self.symbols), self._may_be_padded)

    def _may_be_padded(self, number: int) -> bool:
        value = self._inputs[number] if number < len(self._inputs) else None
        return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)

    def _plan(self, lengths: Sequence[int]) -> _Plan:
        true = dict(zip(self._where, lengths, strict=True))
        padded = true if self.is_refused else self._padded(true)
        if padded == true:
            return _Plan((), tuple(lengths), ())
        inputs = _changes(self._inputs, true, padded)
        taken = self._arguments.taken if self._arguments is not None else ()
        own_results = [None if i in taken else result for i, result in enumerate(self._results)]
        return _Plan(inputs, tuple(lengths), _changes(own_results, padded, true))

    def _padded(self, true: dict[sympy.Symbol, int]) -> dict[sympy.Symbol, int]:
        environment = self._shape_env()
        padded = {s: self._buckets.size_for(n, _cap(environment, s)) for s, n in true.items()}
        broken = next((guard.expr for guard in environment.guards if not _holds(guard.expr, padded)), None)
        shrunk = next((size for size in self._sizes if _value(size, padded) < _value(size, true)), None)
        if broken is not None:
            reason = (
                f"it would break the guard {self._named(broken)} of the graph. Where your code branches on that size, "
                "use it as a number (x * (x.shape[1] > 6)), or choose buckets on the same side of the branch. If that "
                "size should not vary, mark the sizes that do with kp_dynamo.mark_sequence and leave out dynamic=True"
            )
        elif shrunk is not None:
            reason = f"a tensor of size {self._named(shrunk)} would be too short. {_REMEDY}"
        else:
            return padded
        self._warn_exact_lengths(true, padded, reason)
        return true

    def _named(self, expr: sympy.Basic) -> sympy.Basic:
        return expr.xreplace({s: sympy.Symbol(f"size {d} of input {i}") for s, (i, d) in self._where.items()})

    def _warn_exact_lengths(self, true: dict[sympy.Symbol, int], padded: dict[sympy.Symbol, int], reason: str) -> None:
        reason = f"sizes {list(true.values())} cannot be padded to {list(padded.values())}: {reason}"
        if self._strict:
            raise TPUOptimizationError(f"strict=True and {reason}.")
        TELEMETRY.count("exact_lengths")
        _warn_once(f"a length is compiled without padding: {reason}.")

    def _shape_env(self) -> Any:
        position, d = next(iter(self._where.values()))
        return self._inputs[position].shape[d].node.shape_env

    def _resized(self, tensor: torch.Tensor, shape: Shape) -> torch.Tensor:
        if tensor.requires_grad and torch.is_grad_enabled():
            return Resize.apply(tensor, shape, self._poisons)  # type: ignore[no-any-return, no-untyped-call]
        return resized(tensor, shape, poisons=self._poisons)


def bucketed(capture: Capture, buckets: Buckets, *, poisons: bool, strict: bool) -> tuple[Capture, Bucketing | None]:
    """The capture with the true lengths as extra inputs; the same capture and None if it has no symbolic size."""
    bucketing = Bucketing(capture.gm, buckets, poisons=poisons, strict=strict)
    _warn_static_dims(capture.gm, capture.inputs)
    if not bucketing.symbols:
        return capture, None
    lengths = [torch.tensor(1) for _ in bucketing.symbols]
    gm = _with_inputs(capture.gm, [f"true_length_{number}" for number in range(len(lengths))])
    return replace(capture, gm=gm, inputs=[*capture.inputs, *lengths]), bucketing


def _warn_static_dims(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Warn about sizes that were marked as varying but that the model specializes: each is compiled separately."""
    examples = [_example(n) for n in gm.graph.nodes if n.op == "placeholder"]
    for number, (value, example) in enumerate(zip(inputs, examples, strict=True)):
        for d in getattr(value, "_dynamo_weak_dynamic_indices", ()):
            size = example.shape[d]
            is_fixed = not (isinstance(size, torch.SymInt) and size.node.expr.free_symbols)
            if is_fixed and value.shape[d] > 1:
                _warn_once(
                    f"dimension {d} of input {number} was marked as varying, but the model fixes it at "
                    f"{value.shape[d]}: it is compiled for each length. Try: torch._dynamo.mark_dynamic instead of "
                    "mark_sequence, which reports where"
                )


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        logger.warning("%s", text)


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


def mark_sequence(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Mark a dimension whose size varies from call to call; `options={"buckets": ...}` pads such dimensions.

    Call it on each input of a compiled model, at least before the first call: `model(mark_sequence(ids, 1))`. If the
    model fixes the size anyway (it branches on it, or a table has exactly that size), each size is compiled
    separately; torch's `mark_dynamic` makes that an error.

    Args:
        tensor: An input of the model.
        dim: The dimension; a negative one counts from the end.

    Returns:
        `tensor` itself.

    Raises:
        TPUValidationError: `tensor` is not a tensor, or it has no such dimension.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TPUValidationError(f"mark_sequence takes a tensor, not a {type(tensor).__name__}")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        raise TPUValidationError(
            f"dim={dim!r} is invalid: not a dimension of a tensor of shape {tuple(tensor.shape)}. Allowed: "
            f"{-tensor.dim()} to {tensor.dim() - 1}"
        )
    torch._dynamo.maybe_mark_dynamic(tensor, dim % tensor.dim())
    return tensor


def _example(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _first_places(inputs: Sequence[Any]) -> dict[sympy.Symbol, tuple[int, int]]:
    """Symbol of a length -> the input and dimension it is read from."""
    found: dict[sympy.Symbol, tuple[int, int]] = {}
    for position, value in enumerate(inputs):
        for d, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                found.setdefault(size.node.expr, (position, d))
    return found


def _changes(
    values: Sequence[Any], source: dict[sympy.Symbol, int], target: dict[sympy.Symbol, int]
) -> tuple[tuple[int, Shape | float], ...]:
    """(position, shape or number) of the values that differ between two sets of lengths."""
    pairs = [(i, _at(v, source), _at(v, target)) for i, v in enumerate(values)]
    return tuple((i, new) for i, old, new in pairs if new is not None and new != old)


def _at(value: Any, sizes: dict[sympy.Symbol, int]) -> Shape | float | None:
    """The shape of a tensor, or a symbolic number, at given lengths; None if they do not depend on a length."""
    if isinstance(value, torch.SymInt) and not value.node.expr.free_symbols <= sizes.keys():  # an input's stride
        return None
    for symbolic, number in ((torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool)):
        if isinstance(value, symbolic):
            return number(_value(value.node.expr, sizes))
    if isinstance(value, torch.Tensor):
        return tuple(int(_value(s.node.expr, sizes)) if isinstance(s, torch.SymInt) else int(s) for s in value.shape)
    return None


def _cap(environment: Any, symbol: sympy.Symbol) -> int | None:
    """The largest size that the model's guards allow; None if they do not bound it."""
    bound = environment.bound_sympy(symbol).upper
    return int(bound) if bound.is_Integer and int(bound) < 2**31 else None


def _holds(guard: sympy.Basic, sizes: dict[sympy.Symbol, int]) -> bool:
    """Whether a guard that was made for true lengths also holds for padded lengths."""
    return bool(_value(guard, sizes) != sympy.false)


def _value(expr: sympy.Basic, sizes: dict[sympy.Symbol, int]) -> Any:
    return expr.xreplace({s: sympy.Integer(n) for s, n in sizes.items()})
