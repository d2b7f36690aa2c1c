"""What a chip holds of the parameters of a model under a sharding, and the least that travels because of them.

A matmul whose weight is divided along "data" gathers the weight, or moves its activations instead where these are
smaller. Its gradient is summed over the chips of "data", and a row matmul's result over those of "model". Values travel
in at most two bytes an element, because a cast to bfloat16 may come first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from kp_dynamo.sharding.mesh import DATA, MODEL, NamedMesh
from kp_dynamo.sharding.placement import Placement, axes_of, shard_shape
from kp_dynamo.sharding.rules import Sharding, placements
from kp_dynamo.sharding.words import input_dim

ALL_ROWS = 2**60
"""More rows than any weight has elements, so that the weight moves and not its activations."""

_WIRE_BYTES = 2


@dataclass(frozen=True)
class Weight:
    """A kind of parameter or buffer; a model has several of most kinds.

    Attributes:
        shard_bytes: What a chip holds of it.
        is_trained: Whether it has a gradient and optimizer state. A parameter that no program reads has none.
        is_unread: Whether it is a parameter that no program reads.
        is_gathered: Whether it is divided along "data".
        part: The shape of what the chips of "data" have together: whole, except along "model".
        row_columns: For the weight of a row matmul, the columns of the result that is summed over "model"; else 0.
        is_lookup: Whether it is an embedding, whose backward sums nothing over "model".
        element_bytes: Bytes of an element.
        reads: How many programs of a step read it.
    """

    shard_bytes: int
    is_trained: bool
    is_unread: bool
    is_gathered: bool
    part: tuple[int, ...]
    row_columns: int
    is_lookup: bool
    element_bytes: int
    reads: int

    @property
    def wire_bytes(self) -> int:
        """Bytes of an element that travels."""
        return min(self.element_bytes, _WIRE_BYTES)

    @property
    def has_counterpart(self) -> bool:
        """Whether the backward sums the gradient of its pair's input."""
        return self.row_columns > 0 and self.is_trained and not self.is_lookup

    def moved_bytes(self, rows: int) -> int:
        """The least that moves when a matmul over `rows` rows meets this weight: itself, or its activations."""
        smallest = min(self.part, default=1)
        return min(prod(self.part), rows * smallest) * self.wire_bytes


@dataclass(frozen=True)
class Weights:
    """All parameters and buffers of a model under a sharding: each kind, and how many there are of it."""

    kinds: tuple[tuple[Weight, int], ...]

    @property
    def num_bytes(self) -> int:
        """Parameters and buffers on a chip."""
        return sum(count * w.shard_bytes for w, count in self.kinds)

    @property
    def trained_bytes(self) -> int:
        """Parameters with a gradient on a chip."""
        return sum(count * w.shard_bytes for w, count in self.kinds if w.is_trained)

    @property
    def unread_bytes(self) -> int:
        """Parameters on a chip that no program reads."""
        return sum(count * w.shard_bytes for w, count in self.kinds if w.is_unread)

    @property
    def largest_whole_bytes(self) -> int:
        """Of the largest weight that a program gathers, in two bytes an element, with its gradient."""
        gathered = ((prod(w.part), w) for w, _ in self.kinds if w.is_gathered)
        return max((n * (_WIRE_BYTES + (w.element_bytes if w.is_trained else 0)) for n, w in gathered), default=0)

    def gathered_bytes(self, rows: int) -> int:
        """Whole bytes of the all-gathers of a step along "data"."""
        return sum(count * w.reads * w.moved_bytes(rows) for w, count in self.kinds if w.is_gathered)

    def scattered_bytes(self, rows: int) -> int:
        """Whole bytes of the gradients that are reduced along "data" and scattered."""
        return sum(n * w.moved_bytes(rows) for w, n in self.kinds if w.is_trained and w.is_gathered)

    def reduced_bytes(self, rows: int) -> int:
        """Bytes of the gradients that are reduced along "data" and stay whole."""
        return sum(n * w.moved_bytes(rows) for w, n in self.kinds if w.is_trained and not w.is_gathered)

    def summed_bytes(self, rows: int, train: bool) -> int:
        """The least bytes of sums along "model": results of row matmuls, in training their counterparts' too.

        The counterpart of one may be missing: that of the first pair, if the model's input needs no gradient.
        """

        def least(w: Weight) -> int:
            return min(prod(w.part), rows * w.row_columns)

        twice = (w for w, _ in self.kinds if train and w.has_counterpart)
        return self._summed_bytes(rows, train, least) - max((least(w) * w.wire_bytes for w in twice), default=0)

    def result_bytes(self, rows: int, train: bool) -> int:
        """The same if whole results are summed, also where a weight is smaller."""
        return self._summed_bytes(rows, train, lambda w: rows * w.row_columns)

    def _summed_bytes(self, rows: int, train: bool, elements: Callable[[Weight], int]) -> int:
        found = 0
        for w, count in self.kinds:
            times = 2 if train and w.has_counterpart else 1
            found += count * times * elements(w) * w.wire_bytes
        return found


def weights_of(
    model: nn.Module,
    mesh: NamedMesh,
    sharding: Sharding,
    reads: Mapping[str, int],
    train: bool,
    plan: Mapping[str, Any] | None = None,
) -> Weights:
    """The parameters and buffers of a model on a mesh; `plan` is that of "tensor", if the model brings none.

    Raises:
        TPUConfigurationError: The sharding does not fit the model or the mesh.
    """
    lies = placements(model, mesh, sharding, plan)
    found: Counter[Weight] = Counter()
    for name, owner, tensor in _tensors(model):
        found[_weight(tensor, owner, lies[name], mesh, reads.get(name, 0), train)] += 1
    return Weights(tuple(found.items()))


def _tensors(model: nn.Module) -> Iterable[tuple[str, nn.Module, torch.Tensor]]:
    """Each parameter and buffer once, with the module that has it."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        yield name, model.get_submodule(name.rpartition(".")[0]), tensor


def _weight(
    tensor: torch.Tensor, owner: nn.Module, placement: Placement, mesh: NamedMesh, reads: int, train: bool
) -> Weight:
    axes = [axis for along in placement for axis in axes_of(along)]
    of_model: Any = tuple(MODEL if MODEL in axes_of(along) else None for along in placement)
    part = shard_shape(tuple(tensor.shape), of_model, mesh)
    inputs = None if isinstance(owner, nn.EmbeddingBag) else input_dim(owner)  # a bag is one row of the result
    is_row = inputs is not None and tensor.dim() == 2 and of_model[inputs] == MODEL and mesh.size(MODEL) > 1
    return Weight(
        shard_bytes=prod(shard_shape(tuple(tensor.shape), placement, mesh)) * tensor.element_size(),
        is_trained=train and isinstance(tensor, nn.Parameter) and tensor.requires_grad and reads > 0,
        is_unread=isinstance(tensor, nn.Parameter) and reads == 0,
        is_gathered=DATA in axes and mesh.size(DATA) > 1,
        part=part,
        row_columns=part[1 - inputs] if is_row and inputs is not None else 0,
        is_lookup=isinstance(owner, nn.Embedding),
        element_bytes=tensor.element_size(),
        reads=reads,
    )
