"""The placement of every parameter and buffer of a model, from a word such as "fsdp" or a dict of patterns.

1. "data": parameters are whole on every device; only the batch is divided, along the axis "data".
2. "tensor": matmuls are divided along the axis "model", by the plan that a model of transformers brings
   (`_tp_plan`), or by the pairs of matmuls that its graph has.
3. "fsdp": each parameter is divided along the axis "data" (`fsdp.py`).
4. "fsdp+tensor": 2, then 3 in the dimensions that are left.
5. A dict: patterns to words or to mesh axes (`patterns.py`). What no pattern names is whole.

A dimension that does not divide is refused. XLA would pad its shards: the chips would hold and multiply padding that
nobody sees, and a padded buffer cannot be donated. The batch may be uneven, because it changes from call to call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.sharding.fsdp import divided_by_data
from kp_dynamo.sharding.mesh import DATA, MODEL, NamedMesh
from kp_dynamo.sharding.patterns import Ruled, ruled
from kp_dynamo.sharding.placement import MOST_DIMS, Placement, axes_of, counts, is_whole
from kp_dynamo.sharding.text import listed

Sharding = str | Mapping[str, Any]
"""A word, or a dict of patterns to words of tensor parallelism or to one mesh axis a dimension."""

WORDS = ("data", "fsdp", "tensor", "fsdp+tensor")


@dataclass(frozen=True)
class _Tied:
    """A parameter or buffer and all its names."""

    names: tuple[str, ...]
    tensor: torch.Tensor


def placements(
    model: nn.Module, mesh: NamedMesh, sharding: Sharding, plan: Mapping[str, Any] | None = None
) -> dict[str, Placement]:
    """The placement of each parameter and buffer, by every name that it has; one entry a dimension.

    Tied parameters, one tensor under several names, get one placement. Buffers are whole unless a pattern names them.

    Args:
        model: The model.
        mesh: The mesh.
        sharding: What the user asks for.
        plan: The plan of "tensor" for a model that brings none; None if its graphs were not searched.

    Raises:
        TPUConfigurationError: `sharding` is invalid, does not fit the model or the mesh, or leaves an axis of the mesh
            without use.
    """
    _check(model, sharding)
    _require_axes(mesh, sharding)
    rules, tensors = _rules(model, mesh, sharding, plan), list(_tensors(model))
    found = {id(tied.tensor): _agreed(tied, rules) for tied in tensors}
    _require_few_dims(tensors, found, mesh)
    _require_division(tensors, found, mesh)
    if isinstance(sharding, str) and "fsdp" in sharding:
        parameters = [t for t in tensors if isinstance(t.tensor, nn.Parameter)]
        divided = divided_by_data(((t.names[0], t.tensor, found[id(t.tensor)]) for t in parameters), mesh)
        found |= {id(tensor): placement for tensor, placement in divided}
    _require_use(mesh, sharding, found.values())
    return {name: found[id(tied.tensor)] for tied in tensors for name in tied.names}


def own_plan(model: nn.Module) -> dict[str, str]:
    """The tensor-parallel plan that a model of transformers brings, or a module inside of `model`.

    transformers 4.57 keeps the plan of the layers in the instance and that of the head in the class.
    """
    plan: dict[str, str] = {}
    for path, module in model.named_modules():
        for found in (getattr(type(module), "_tp_plan", None), vars(module).get("_tp_plan")):
            if isinstance(found, Mapping):
                plan.update({f"{path}.{pattern}" if path else pattern: word for pattern, word in found.items()})
    return plan


def _check(model: Any, sharding: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TPUConfigurationError(f"model of type {type(model).__name__} is invalid. Allowed: a torch.nn.Module.")
    check_sharding(sharding)


def check_sharding(sharding: Any) -> None:
    """Raise a TPUConfigurationError if this is neither a word nor a dict with an entry. A dict is read with a model."""
    allowed = f"{', '.join(map(repr, WORDS))}, or a dict such as {{'layers.*.up': 'colwise'}}"
    is_valid = sharding in WORDS if isinstance(sharding, str) else isinstance(sharding, Mapping)
    if not is_valid or not sharding:
        raise TPUConfigurationError(f"sharding={sharding!r} is invalid. Allowed: {allowed}.")


def _require_axes(mesh: NamedMesh, sharding: Sharding) -> None:
    """Raise if the mesh lacks the axis that a word needs; the patterns of a dict are checked one by one."""
    parts = sharding.split("+") if isinstance(sharding, str) else []
    for part in parts:
        mesh.size(MODEL if part == "tensor" else DATA)


def _tensors(model: nn.Module) -> Iterator[_Tied]:
    """Each parameter and buffer once."""
    names: dict[int, list[str]] = {}
    found = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in found:
        names.setdefault(id(tensor), []).append(name)
    for tensor in {id(tensor): tensor for _, tensor in found}.values():
        yield _Tied(tuple(names[id(tensor)]), tensor)


def _rules(model: nn.Module, mesh: NamedMesh, sharding: Sharding, plan: Mapping[str, Any] | None) -> dict[str, Ruled]:
    """The rules for single parameters, by name."""
    if not isinstance(sharding, str):
        return ruled(model, mesh, sharding, is_own_plan=False)
    if "tensor" not in sharding:
        return {}
    found = ruled(model, mesh, own_plan(model) or plan or {}, is_own_plan=True)
    if not found:
        kind, size = type(model).__name__, mesh.size(MODEL)
        searched = (
            f"its graph has no column matmul and row matmul, with nothing between them that needs communication, that "
            f"divide among {size} chips"
        )
        raise TPUConfigurationError(
            f"sharding={sharding!r} needs to know which matmuls to divide, and a {kind} brings no plan for it "
            f"(`_tp_plan`, which models of transformers have){'' if plan is None else f'; {searched}'}. Allowed: a "
            f"model with a plan, {'arguments to find one in its graph, ' if plan is None else ''}or a dict. Try: "
            f"{'example_args=(batch,), or ' if plan is None else ''}"
            "sharding={'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}, with the paths of this model."
        )
    return found


def _agreed(tied: _Tied, rules: Mapping[str, Ruled]) -> Placement:
    """The one placement of a tensor, by the rules for any of its names."""
    found = [(name, rules[name]) for name in tied.names if name in rules]
    if not found:
        return (None,) * tied.tensor.dim()
    first, one = found[0]
    for name, other in found[1:]:
        if other.placement != one.placement:
            raise TPUConfigurationError(
                f"{first} and {name} are one parameter (tied), but sharding has different rules: {one.pattern!r} makes "
                f"it {one.placement}, {other.pattern!r} makes it {other.placement}. Try: one rule for both."
            )
    return one.placement


def _require_few_dims(tensors: Iterable[_Tied], found: Mapping[int, Placement], mesh: NamedMesh) -> None:
    divided = (tied for tied in tensors if not is_whole(found[id(tied.tensor)], mesh))
    if many := [f"{t.names[0]} {list(t.tensor.shape)}" for t in divided if t.tensor.dim() > MOST_DIMS]:
        raise TPUConfigurationError(
            f"sharding divides parameters of more than {MOST_DIMS} dimensions, which torch_xla 2.9 cannot place: "
            f"{listed(many)}. Allowed: up to {MOST_DIMS} dimensions. Try: 'replicate' for them, or parameters of fewer "
            "dimensions that forward() views in more."
        )


def _require_division(tensors: Iterable[_Tied], found: Mapping[int, Placement], mesh: NamedMesh) -> None:
    problems = [
        f"dimension {dim} of {tied.names[0]} {list(tied.tensor.shape)} into {count} (multiples of {count}, "
        f"such as {-(-size // count) * count}, do)"
        for tied in tensors
        for dim, (size, count) in enumerate(
            zip(tied.tensor.shape, counts(found[id(tied.tensor)], mesh, tied.tensor.dim()), strict=True)
        )
        if size % count
    ]
    if problems:
        raise TPUConfigurationError(
            f"sharding cannot divide, on mesh={mesh}: {listed(problems)}. Try: pad the parameter, such as "
            "model.resize_token_embeddings(pad_to_multiple_of=...) for a vocabulary, or leave it whole with a dict: "
            "{'path': 'replicate'}, in a model of transformers with {**model.tp_plan, 'path': 'replicate'}."
        )


def _require_use(mesh: NamedMesh, sharding: Sharding, found: Iterable[Placement]) -> None:
    """Raise if nothing is divided along an axis: its devices would all compute the same."""
    used = {DATA, *(axis for placement in found for axes in placement for axis in axes_of(axes))}
    name = repr(sharding) if isinstance(sharding, str) else "the given dict"
    for axis, size in zip(mesh.names, mesh.sizes, strict=True):
        if size > 1 and axis not in used:
            raise TPUConfigurationError(
                f"mesh={mesh} has the axis {axis!r}, but {name} divides nothing along it, so its {size} devices would "
                f"all compute the same. Allowed: {DATA!r}, which divides the batch, and axes that divide a parameter. "
                f"Try: a mesh without {axis!r}, or a sharding that uses it."
            )
