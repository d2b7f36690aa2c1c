"""The pass `fold_casts`."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

import kp_dynamo.ops  # noqa: F401  # registers the operators
from kp_dynamo.graph.editing import cast_to, erase_unused, insert_call
from kp_dynamo.graph.nodes import calls, is_tangent
from kp_dynamo.graph.op_tables import BIASES, LINEAR_ACTS, MATMULS, VIEWS
from kp_dynamo.passes.base import PassReport
from kp_dynamo.passes.precision.cast_nodes import ADDED, is_bfloat16, is_downcast, is_upcast
from kp_dynamo.passes.precision.matmul_rules import ONE_PASS, has_float32_matmul

aten, kp = torch.ops.aten, torch.ops.kp

_OURS = (kp.contract.default, *LINEAR_ACTS)
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
_FOLDED = (aten.mm.default, aten.addmm.default, *_OURS)


@dataclass(frozen=True)
class FoldCasts:
    """Let the matrix unit round the arguments of a program: changes no value on a TPU, and rounds less on XLA:CPU.

        before                                                    after
        _to_copy: bf16[8, 6] = aten._to_copy(x, dtype=bf16)
        _to_copy_1: bf16[4, 6] = aten._to_copy(weight, ...)
        t: bf16[6, 4] = aten.t(_to_copy_1)                        t: f32[6, 4] = aten.t(weight)
        mm: bf16[8, 4] = aten.mm(_to_copy, t)                     mm: f32[8, 4] = aten.mm(x, t)
                                                                  _to_copy: bf16[8, 4] = aten._to_copy(mm, dtype=bf16)

    A float32 matmul at XLA's precision "default" rounds its operands to bfloat16 as they enter the matrix unit, and
    accumulates in float32. A cast before it gives the same bits, but is expensive if the operand is an argument of the
    program: the v5e's compiler fuses the cast into the matmul and repeats it for each tile. Its figures for an MLP
    (2048 x 1024 -> 4096 -> 1024, cycles ms): inference 0.317 with the casts, 0.199 without those of the first matmul,
    0.188 without any, as by openxla; training 0.820, 0.680 and 0.78.

    Fires on mm, addmm, kp::linear_act and kp::contract whose operands are casts and views of float32 graph inputs; one
    operand may be the float32 result of an ungated kp::linear_act. Results keep their dtypes. Casts after a norm or
    another matmul stay: removing the cast of only one operand makes a GPT slower (0.681 -> 0.702), removing that of a
    gated activation a T5 (2.066 -> 2.118), and removing both casts of a 3 x 3 convolution too (0.196 -> 0.269).

    Fires also on convolutions with a kernel of 1 x 1, forward and backward, if any operand is cast: a v5e takes 386,016
    cycles to cast a weight [2048, 1024, 1, 1]. Without these casts a training step of a ResNet-50 takes 8.56 instead of
    12.16 cycles ms and 3.75 instead of 3.82 modelled ms.

    Leaves the user's casts alone, and any graph with another float32 matmul: that matmul may need a higher precision,
    and the precision applies to the whole program.
    """

    name: ClassVar[str] = "fold_casts"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        if has_float32_matmul(gm.graph):
            return PassReport(self.name, 0)
        found = [n for n in calls(gm.graph, *_FOLDED) if _is_foldable(_operands(n))]
        found += [
            n for n in calls(gm.graph, *_CONVOLUTIONS) if _is_pointwise(n) and any(map(_cast_source, _operands(n)))
        ]
        for matmul in found:
            _fold(matmul)
        return PassReport(self.name, len(found))


def _is_pointwise(convolution: fx.Node) -> bool:
    """Whether its kernel is 1 x 1."""
    weight: Any = convolution.args[1 if convolution.target is aten.convolution.default else 2]
    return all(size == 1 for size in weight.meta["val"].shape[2:])


def _operands(matmul: fx.Node) -> list[Any]:
    return [matmul.args[position] for position in MATMULS[matmul.target]]


def _is_foldable(operands: list[Any]) -> bool:
    sources = [_cast_source(operand) for operand in operands]
    is_argument = [source is not None and source.op == "placeholder" for source in sources]
    return any(is_argument) and all(a or _is_activation(s) for a, s in zip(is_argument, sources, strict=True))


def _cast_source(node: Any) -> fx.Node | None:
    """The float32 value that `node` reads through our casts and views, or None if these round nothing."""
    is_rounded = False
    while node.target in VIEWS or (node.meta.get(ADDED) and (is_downcast(node) or is_upcast(node))):
        is_rounded |= is_downcast(node)
        node = node.args[0]
    return node if is_rounded and not is_tangent(node) else None


def _is_activation(source: fx.Node | None) -> bool:
    if source is not None and source.target is operator.getitem and source.args[1] == 0:
        source = source.args[0]  # type: ignore[assignment]  # kp::linear_act_train returns its result and what it saves
    return source is not None and source.target in LINEAR_ACTS and "multiplier" not in source.kwargs


def _fold(matmul: fx.Node) -> None:
    """Replace `matmul` by one that reads the arguments directly."""
    graph, args, kwargs = matmul.graph, list(matmul.args), dict(matmul.kwargs)
    with graph.inserting_before(matmul):
        for position in MATMULS[matmul.target]:
            args[position] = cast_to(_uncast(args[position], like=matmul), torch.float32, like=matmul)
        bias = BIASES.get(matmul.target, 2 if matmul.target in (*_OURS, aten.convolution.default) else None)
        if bias is not None and args[bias] is not None:
            args[bias] = _wide(args[bias], like=matmul)
        if matmul.target in _OURS:
            kwargs.setdefault("out_dtype", _first(matmul.meta["val"]).dtype)
        made = insert_call(graph, matmul.target, tuple(args), kwargs, like=matmul)
        made.meta[ONE_PASS] = True
        _replace(matmul, made)


def _uncast(node: Any, like: fx.Node) -> fx.Node:
    """The same views, of the value before the casts."""
    if node.target not in VIEWS and not node.meta.get(ADDED):
        return node  # type: ignore[no-any-return]
    source = _uncast(node.args[0], like)
    if node.target not in VIEWS:
        return source
    # The cast returned a dense tensor; its source may not be dense.
    target = aten.reshape.default if node.target is aten.view.default else node.target
    return insert_call(node.graph, target, (source, *node.args[1:]), node.kwargs, like=like)


def _wide(node: Any, like: fx.Node) -> fx.Node:
    """The float32 form of an addend: the value before rounding, if there is one."""
    if is_downcast(node):
        return node.args[0]  # type: ignore[no-any-return]
    return cast_to(node, torch.float32, like=like)


def _first(value: Any) -> torch.Tensor:
    first: torch.Tensor = value[0] if isinstance(value, (list, tuple)) else value
    return first


def _replace(matmul: fx.Node, made: fx.Node) -> None:
    """Make the readers of `matmul` read `made`, each result in its previous dtype."""
    parts = [user for user in matmul.users if user.target is operator.getitem]
    pairs = [(part, insert_call(made.graph, operator.getitem, (made, part.args[1]), {}, like=part)) for part in parts]
    for old, new in pairs or [(matmul, made)]:
        if is_bfloat16(old) and not is_bfloat16(new):
            new = cast_to(new, torch.bfloat16, like=old)
        old.replace_all_uses_with(new)
        erase_unused(old)
    erase_unused(matmul)
