"""The pass `exchange_gradients`."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

import kp_dynamo.ops.gathered  # noqa: F401  # registers the operator
from kp_dynamo.graph.editing import cast_to, insert_call, replace_node
from kp_dynamo.graph.nodes import fake_of, gradients_by_position
from kp_dynamo.graph.weight_matmuls import DividedWeight, axes_in, dim_in, divided_dim, is_small, path_to_matmul
from kp_dynamo.passes.base import PassReport
from kp_dynamo.passes.precision.matmul_rules import ONE_PASS

aten, kp = torch.ops.aten, torch.ops.kp


@dataclass(frozen=True)
class ExchangeGradients:
    """Sum the gradients of weights over the chips along the batch by an all-to-all and a sum on each chip.

        before                                       after
        mm: bf16[8, 6] = aten.mm(d, x)               reshape: bf16[8, 4, 2] = aten.reshape(d, [8, 4, 2])
                                                     reshape_1: bf16[4, 2, 6] = aten.reshape(x, [4, 2, 6])
                                                     contract: bf16[4, 8, 6] = kp.contract(..., "adb,dbc->dac")
        _to_copy: f32[8, 6] = aten._to_copy(mm)      sum_parts: f32[8, 6] = kp.sum_parts(contract, 0)

    The new dimension has one part for each chip along the batch. Other axes of the mesh divide the parts and the sum as
    they divide the weight: kp.sum_parts(contract, 0, "model,").

    XLA's own reduce-scatter is exposed on a TPU, and on a square slice it is a whole all-reduce; libtpu lets other
    operators run beside an all-to-all. `python -m bench.fsdp` has the figures.

    Fires on the gradients of parameters that mm or kp::contract computes, over rows that divide among the chips. Parts
    are rounded where the gradient was, and their sum is not.

    Leaves alone gradients with few elements, which lie whole on each chip; gradients with more elements than what is
    multiplied for them; rows whose number is symbolic; and gradients whose other parts do not divide a dimension of the
    matmul's result.

    Attributes:
        weights: The arguments that are parameters.
        num_chips: How many chips are along the batch.
        num_parts: Among how many chips the other axes divide.
    """

    weights: tuple[DividedWeight, ...] = ()
    num_chips: int = 1
    num_parts: int = 1

    name: ClassVar[str] = "exchange_gradients"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        gradients = gradients_by_position(gm.graph)
        found = [self._exchange(gradients[w.position], w) for w in self.weights if w.position in gradients]
        return PassReport(self.name, sum(found))

    def _exchange(self, gradient: fx.Node, weight: DividedWeight) -> bool:
        path = path_to_matmul(gradient)
        if path is None or is_small(gradient) or not weight.is_along_batch:
            return False
        matmul = path[-1]
        axes = axes_in(matmul, gradient, weight.axes, self.num_parts)
        equation, dim = _equation(matmul), self._divided_dim(matmul, gradient, weight, axes or ())
        rows = None if equation is None else _rows_of(equation, matmul, self.num_chips)
        if equation is None or rows is None or dim is None or axes is None:
            return False
        with matmul.graph.inserting_before(matmul):
            total = self._sum(matmul, equation, rows, (dim, ",".join(axes)) if axes else (dim,))
        replace_node(gradient, _viewed(total, path))
        return True

    def _divided_dim(
        self, matmul: fx.Node, gradient: fx.Node, weight: DividedWeight, axes: Sequence[str]
    ) -> int | None:
        """The dimension of the matmul's result that is divided in the gradient, as "fsdp" divides its parameter.

        Where a view has copied, the largest dimension of the result is taken; XLA then moves the sum once more.
        """
        along = divided_dim(gradient, self.num_chips) if weight.dim is None else weight.dim
        if along is None:
            return None
        is_shared = bool(weight.axes) and bool(weight.axes[along])
        found = dim_in(matmul, gradient, along, self.num_chips * (self.num_parts if is_shared else 1))
        sizes = fake_of(matmul).shape
        left = [i for i, size in enumerate(sizes) if size % self.num_chips == 0 and not (axes and axes[i])]
        return found if found is not None else max(left, key=lambda dim: sizes[dim], default=None)

    def _sum(self, matmul: fx.Node, equation: str, rows: str, where: tuple[Any, ...]) -> fx.Node:
        """The sum of the parts, of which each chip computes one from its rows."""
        chips = next(letter for letter in string.ascii_lowercase if letter not in equation)
        terms, result = equation.split("->")
        operands = [
            self._split(operand, term.index(rows), matmul)
            for operand, term in zip(matmul.args[:2], terms.split(","), strict=True)
        ]
        split = terms.replace(rows, chips + rows)
        args = (*operands, None, f"{split}->{chips}{result}")
        parts = insert_call(matmul.graph, kp.contract.default, args, _dtype_of(matmul), like=matmul)
        if ONE_PASS in matmul.meta:
            parts.meta[ONE_PASS] = matmul.meta[ONE_PASS]
        return insert_call(matmul.graph, kp.sum_parts.default, (parts, *where), {}, like=matmul)

    def _split(self, operand: Any, dim: int, matmul: fx.Node) -> fx.Node:
        """An operand with its rows as two dimensions: the chips, and the rows of each."""
        shape = list(fake_of(operand).shape)
        shape[dim : dim + 1] = [self.num_chips, int(shape[dim]) // self.num_chips]
        return insert_call(matmul.graph, aten.reshape.default, (operand, shape), {}, like=matmul)


def _dtype_of(matmul: fx.Node) -> dict[str, Any]:
    return {"out_dtype": fake_of(matmul).dtype} if matmul.kwargs.get("out_dtype") is not None else {}


def _equation(matmul: fx.Node) -> str | None:
    """The contraction of a matmul of real numbers and known sizes; None if it adds a bias or an activation."""
    operands = [fake_of(operand) for operand in matmul.all_input_nodes]
    if not all(x.is_floating_point() and all(isinstance(size, int) for size in x.shape) for x in operands):
        return None
    if matmul.target is aten.mm.default:
        return "ab,bc->ac"
    is_plain = matmul.target is kp.contract.default and matmul.args[2] is None
    return str(matmul.args[3]) if is_plain else None


def _rows_of(equation: str, matmul: fx.Node, num_chips: int) -> str | None:
    """The letter of the rows that divide among the chips: of those that are summed, one that begins an operand."""
    (first, second), result = equation.split("->")[0].split(","), equation.split("->")[1]
    summed = [letter for letter in first if letter in second and letter not in result]
    rows = next((letter for letter in summed if letter in (first[0], second[0])), summed[0])
    size = fake_of(matmul.args[0]).shape[first.index(rows)]  # type: ignore[arg-type]
    return rows if size % num_chips == 0 else None


def _viewed(total: fx.Node, path: list[fx.Node]) -> fx.Node:
    """The sum as the gradient at the start of `path` views it, cast once, at the end."""
    value = total
    for node in reversed(path[:-1]):
        if node.target is not aten._to_copy.default:
            with node.graph.inserting_before(node):
                value = insert_call(node.graph, node.target, (value, *node.args[1:]), node.kwargs, like=node)
    with value.graph.inserting_before(path[0].next):
        return cast_to(value, fake_of(path[0]).dtype, like=path[0])
