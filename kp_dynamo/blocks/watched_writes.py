"""Which tensors calls write to, seen while they run on fake tensors.

A write to a tensor increases its version; but not if a fake tensor is in a list that an operator writes to
(`torch._foreach_mul_`), so that the schemas of the ATen operators are asked too. That of BatchNorm does not say that it
updates its statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class WatchedWrites(TorchDispatchMode):
    """Notes what calls write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._written: set[int] = set()  # storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._written.update(_storage(tensor) for tensor in _written_by(func, args, kwargs))
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def has_written(self, value: Any) -> bool:
        """Whether a call wrote to a tensor of `value`, which was new before it."""
        tensors = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
        return any(t._version > 0 or _storage(t) in self._written for t in tensors)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of an ATen operator that it writes to."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if func is torch.ops.aten.native_batch_norm.default and given["training"]:
        written += ["running_mean", "running_var"]
    return [t for t in tree_leaves([given.get(name) for name in written]) if isinstance(t, torch.Tensor)]
