"""Fully sharded parameters: each is divided along the axis "data", beside what already divides it.

A matmul gathers its weight from all devices and drops it again; a gradient is reduced and scattered. Only the results'
rounding depends on the dimension that is divided, so the largest one that divides evenly is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.sharding.mesh import DATA, NamedMesh
from kp_dynamo.sharding.placement import MOST_DIMS, Placement, axes_of, counts
from kp_dynamo.sharding.text import listed

SMALL = 2**14
"""Parameters with fewer elements stay whole. Below 64 KiB (float32), the latency of an all-gather exceeds its transfer:
a v5e sends 64 KiB in about a microsecond. Norms and biases are below it, a thousandth of a model together."""


def divided_by_data(
    parameters: Iterable[tuple[str, torch.Tensor, Placement]], mesh: NamedMesh
) -> Iterable[tuple[torch.Tensor, Placement]]:
    """Each parameter with its placement under "fsdp".

    Args:
        parameters: A name of each, the parameter, and its placement so far.
        mesh: It has the axis "data".

    Raises:
        TPUConfigurationError: No dimension of a large parameter divides.
    """
    divided: list[tuple[torch.Tensor, Placement]] = []
    problems: list[tuple[str, torch.Tensor, Placement]] = []
    for name, tensor, placement in parameters:
        dim = best_dim(tensor, placement, mesh)
        if tensor.numel() < SMALL or tensor.dim() > MOST_DIMS:
            divided.append((tensor, placement))
        elif dim is None:
            problems.append((name, tensor, placement))
        else:
            axes = (*axes_of(placement[dim]), DATA)
            divided.append((tensor, (*placement[:dim], axes if len(axes) > 1 else DATA, *placement[dim + 1 :])))
    if problems:
        raise _indivisible([(name, tensor) for name, tensor, _ in problems], problems[0][2], mesh)
    return divided


def _indivisible(found: Sequence[tuple[str, torch.Tensor]], first: Placement, mesh: NamedMesh) -> TPUConfigurationError:
    """The error for parameters that do not divide; `first` is the placement of the first one so far."""
    count, shape = mesh.size(DATA), found[0][1].shape
    dim = max(range(len(shape)), key=shape.__getitem__)
    multiple = count * counts(first, mesh, len(shape))[dim]
    also = f", or of {multiple} where another axis divides it too" if multiple > count else ""
    texts = [f"{name} {list(tensor.shape)}" for name, tensor in found]
    return TPUConfigurationError(
        f"sharding 'fsdp' cannot divide parameters by {DATA}={count}: {listed(texts)}. Allowed: parameters "
        f"with a dimension that is a multiple of {count}{also}. Those with fewer than {SMALL} elements stay whole. "
        f"Try: {-(-shape[dim] // multiple) * multiple} instead of {shape[dim]}, another size of the axis 'data', or a "
        "dict of patterns to mesh axes."
    )


def axes_when_gathered(placement: Placement) -> tuple[str, ...] | None:
    """The axis that divides each dimension of a tensor when it is gathered along "data", "" for none.

    None if several other axes divide one dimension.
    """
    kept = [tuple(axis for axis in axes_of(axes) if axis != DATA) for axes in placement]
    return tuple("".join(axes) for axes in kept) if all(len(axes) < 2 for axes in kept) else None


def best_dim(tensor: torch.Tensor, placement: Placement, mesh: NamedMesh) -> int | None:
    """A dimension that is whole so far comes first, then the largest, then the first of equal ones."""
    shards, count = counts(placement, mesh, tensor.dim()), mesh.size(DATA)
    fits = [dim for dim, size in enumerate(tensor.shape) if size % (shards[dim] * count) == 0]
    return max(fits, key=lambda dim: (shards[dim] == 1, tensor.shape[dim], -dim), default=None)
