"""The pass `fold_constants`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx

from kp_dynamo.graph.editing import erase_unused, insert_attribute, insert_call, replace_node, set_value
from kp_dynamo.graph.nodes import calls
from kp_dynamo.graph.op_tables import FILLS, is_one_of
from kp_dynamo.graph.pure_operators import is_pure
from kp_dynamo.passes.base import PassReport, Refusal, rewrite_each
from kp_dynamo.passes.constants.generators import generator_of, is_uniform
from kp_dynamo.passes.constants.ownership import COPIES, IDENTITIES, reading_problem, sharing_problem
from kp_dynamo.passes.constants.scalar_forms import use_scalars
from kp_dynamo.passes.constants.shape_sources import drop_shape_sources

aten = torch.ops.aten

# IEEE 754 leaves these no choice.
_ROUNDED_ALIKE = (
    aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.neg, aten.abs, aten.sqrt, aten.reciprocal, aten.minimum,
    aten.maximum, aten.clamp, aten.floor, aten.ceil, aten.trunc, aten.round, aten.where, aten.clone,
)  # fmt: skip


@dataclass(frozen=True)
class FoldConstants:
    """Fold CPU constants into the program: numerics stay the same, bit by bit.

        before                                                        after
        _tensor_constant0: f32[] = attribute _tensor_constant0        mul: f32[4, 3] = aten.mul.Tensor(arg0_1, 2.0)
        lift_fresh_copy: f32[] = aten.lift_fresh_copy.default(...)
        mul: f32[4, 3] = aten.mul.Tensor(arg0_1, lift_fresh_copy)

    `torch.tensor(...)` in a model is a CPU tensor that the graph holds as an attribute and copies on each call. A
    lowering sees that copy as an op on another device in the middle of the graph, which splits the program.

    1. A constant of equal elements (bit by bit: -0.0 is not 0.0) becomes aten.full, for any size and dtype.
    2. An arithmetic sequence, such as [0, 2, 4], of int32 or int64 becomes aten.arange.
    3. Any other constant stays an attribute, and the ops that copy or rename it (lift_fresh_copy, lift_fresh, alias,
       detach) are removed: the lowering moves attributes onto the device as known constants.
    4. A cast of a constant of at most `max_cast_elements` elements is evaluated now; its result is a constant again.
    5. Arithmetic of one-element constants, which is rounded alike everywhere, is evaluated now. The operands of other
       elementwise functions of them become inputs of the program, which then computes log(3.5) as it does log(x). XLA's
       compiler and torch's CPU kernels have other logarithms, and `ceil(log(x) / log(3.5))` would be one too large
       where x is 3.5.
    6. A 0-dim full or scalar_tensor becomes a Python number in the ops that accept one (`scalar_forms.py`), if dtypes
       stay the same and the number is exact in the dtype of the result.
    7. full_like, zeros_like and ones_like of a static shape no longer read the tensor (`shape_sources.py`).
    8. alias and detach of other values are removed as well: an ATen graph is differentiated already.

    Refuses, with the reason: a constant that shares memory with a result of the graph or that an op writes to (a call
    would change it for the next one); a parameter (its owner may change it); a constant whose value cannot be read (a
    subclass, not dense, not on the CPU); a cast that moves to another device or is too large. An alias or detach that
    is a result of the graph stays: it must be a separate tensor object.

    Attributes:
        max_cast_elements: The largest constant whose casts are evaluated now. Beyond 4096 elements one cast in the
            program costs less than a second copy in the process.
    """

    max_cast_elements: int = 4096

    name: ClassVar[str] = "fold_constants"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        with torch.utils._python_dispatch._disable_current_modes():  # a fake mode rejects real tensors
            folding = _Folding(gm, self.max_cast_elements)
            report = rewrite_each(self.name, list(gm.graph.nodes), folding.match, folding.fold)
            others = _drop_identities(gm.graph) + drop_shape_sources(gm.graph) + use_scalars(gm.graph)
        return replace(report, rewritten=report.rewritten + others)


class _Match(NamedTuple):
    """A node that computes a constant, and the op and arguments that generate the constant, if any do.

    The value is None if only a program can compute it.
    """

    node: fx.Node
    value: torch.Tensor | None
    generator: tuple[Any, tuple[Any, ...]] | None


class _Folding:
    """One walk over a graph, in order, that knows the constants before each node."""

    def __init__(self, gm: fx.GraphModule, max_cast_elements: int) -> None:
        self.gm, self.max_cast_elements = gm, max_cast_elements
        self.known: dict[fx.Node, torch.Tensor] = {}

    def match(self, node: fx.Node) -> _Match | Refusal | None:
        if node.op == "get_attr":
            return self._attribute_problem(node)
        if node.target in FILLS and _has_one_element(node):
            self.known[node] = node.target(*node.args, **node.kwargs)
            return None
        if self._is_function_of_numbers(node):
            if not is_one_of(node, _ROUNDED_ALIKE):
                return _Match(node, None, None)
            value: torch.Tensor | Refusal | None = self._computed(node)
        else:
            value = self._constant(node)
        if value is None or isinstance(value, Refusal):
            return value
        generator = generator_of(value)
        problem = None if generator else sharing_problem(node)
        return _Match(node, value, generator) if problem is None else Refusal(node, problem)

    def _attribute_problem(self, node: fx.Node) -> Refusal | None:
        """Remember the value of an attribute, or say why it is unknown."""
        value: Any = reduce(getattr, str(node.target).split("."), self.gm)
        if not isinstance(value, torch.Tensor):
            return None
        problem = reading_problem(value)
        if problem is None:
            self.known[node] = value
        is_copied = any(user.target in COPIES for user in node.users)
        return Refusal(node, problem) if problem and is_copied else None

    def _constant(self, node: fx.Node) -> torch.Tensor | Refusal | None:
        """The constant value of a copy, an alias or a cast."""
        source = node.args[0] if node.op == "call_function" and node.args else None
        value = self.known.get(source) if isinstance(source, fx.Node) else None
        if value is None:
            return None
        if node.target is aten._to_copy.default:
            return self._cast(node, value)
        is_attribute = isinstance(source, fx.Node) and source.op == "get_attr"
        return value if is_attribute and node.target in COPIES + IDENTITIES else None

    def _cast(self, node: fx.Node, value: torch.Tensor) -> torch.Tensor | Refusal:
        device = torch.device(node.kwargs.get("device") or "cpu")  # type: ignore[arg-type]
        if device.type != "cpu":
            return Refusal(node, f"moves the constant to {device}")
        if value.numel() > self.max_cast_elements and not is_uniform(value):
            return Refusal(node, f"a cast of {value.numel()} elements. Allowed: up to {self.max_cast_elements}")
        cast: torch.Tensor = aten._to_copy.default(value, **node.kwargs)
        return cast

    def _is_function_of_numbers(self, node: fx.Node) -> bool:
        """Whether a node is an elementwise function of one-element constants alone, with floating-point values."""
        if node.op != "call_function" or not node.all_input_nodes or not _is_function(node) or sharing_problem(node):
            return False
        values = [self.known.get(source) for source in node.all_input_nodes]
        operands = [value for value in values if value is not None and value.numel() == 1]
        return len(operands) == len(values) and all(v.dtype.is_floating_point for v in (*operands, node.meta["val"]))

    def _computed(self, node: fx.Node) -> torch.Tensor:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.known.__getitem__)
        result: torch.Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
        return result

    def fold(self, found: _Match) -> None:
        node = found.node
        if found.value is None:
            self._hold_operands(node)
            return
        with self.gm.graph.inserting_before(node):
            if found.generator:
                target, args = found.generator
                options = {"dtype": found.value.dtype, "device": torch.device("cpu"), "pin_memory": False}
                made = insert_call(self.gm.graph, target, args, options, like=node, value=node.meta["val"])
            elif node.target in COPIES + IDENTITIES:
                made = node.args[0]  # type: ignore[assignment]  # the attribute itself
            else:
                made = insert_attribute(self.gm, f"{node.name}_constant", found.value, like=node)
        self.known[made] = found.value
        replace_node(node, made)

    def _hold_operands(self, node: fx.Node) -> None:
        """Make the constants that a node reads inputs of the program. They get a dimension: numbers are parts of it."""
        for source in node.all_input_nodes:
            value, fake = self.known[source], source.meta["val"]
            with self.gm.graph.inserting_before(node):
                held = insert_attribute(self.gm, f"{source.name}_input", value.reshape(1), like=source)
                set_value(held, fake.reshape(1))
                shaped = insert_call(
                    self.gm.graph, aten.reshape.default, (held, list(value.shape)), {}, like=source, value=fake
                )
            node.replace_input_with(source, shaped)
            erase_unused(source)


def _has_one_element(node: fx.Node) -> bool:
    """Checks Python numbers only: comparing a symbolic size would add a guard."""
    return all(isinstance(size, int) and size == 1 for size in node.meta["val"].shape) and not node.all_input_nodes


def _is_function(node: fx.Node) -> bool:
    """Whether an operator is a pure elementwise function of its operands."""
    target: Any = node.target
    is_elementwise = is_pure(target) and torch.Tag.pointwise in target.tags
    return is_elementwise and not target._schema.is_mutable and not target.is_view


def _drop_identities(graph: fx.Graph) -> int:
    dropped = 0
    for node in calls(graph, *IDENTITIES):
        if not any(user.op == "output" for user in node.users):
            replace_node(node, node.args[0])  # type: ignore[arg-type]
            dropped += 1
    return dropped
