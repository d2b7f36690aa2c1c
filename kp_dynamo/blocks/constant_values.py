"""The values in Dynamo's graph that depend on no input: positions, and masks made of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from kp_dynamo.blocks.equal_places import CLOSE, OPEN, EqualPlaces
from kp_dynamo.blocks.node_effects import effects_of
from kp_dynamo.blocks.regions import is_level_of_torch_func, name_of
from kp_dynamo.graph.nodes import called
from kp_dynamo.graph.pure_operators import is_pure

_MAX_NODES = 1000
_MAX_BYTES = 1 << 28  # a mask of 8192 x 8192 in float32


def independent(gm: fx.GraphModule) -> dict[fx.Node, None]:
    """The calls that depend on no input, in order, with the levels of vmap; none if another call writes to them."""
    found: dict[fx.Node, None] = {}
    for node in gm.graph.nodes:
        is_level = is_level_of_torch_func(node)
        if is_level and name_of(node) not in (OPEN, CLOSE):
            return {}
        if is_level or _is_independent(node, found):
            found[node] = None
    others = {user: None for node in found for user in node.users if user not in found}
    is_written = any(_version(node) and not found.keys() >= node.users.keys() for node in found)
    is_written = is_written or any(_writes_to_a_list(gm, node) for node in others)
    return {} if is_written or len(found) > _MAX_NODES else found


def _writes_to_a_list(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a call writes to tensors in a list, which leaves their version as it is."""
    has_list = node.op.startswith("call_") and any(isinstance(arg, (list, tuple)) for arg in node.args)
    return has_list and bool(effects_of(gm, node, FakeTensorMode()).writes)


def _is_independent(node: fx.Node, found: Collection[fx.Node]) -> bool:
    if node.op not in ("call_function", "call_method") or not all(source in found for source in node.all_input_nodes):
        return False
    values = tree_leaves(node.meta.get("example_value"))
    return bool(values) and all(isinstance(v, torch.Tensor) and not v._has_symbolic_sizes_strides for v in values)


def _version(node: fx.Node) -> int:
    value = node.meta.get("example_value")
    return value._version if isinstance(value, torch.Tensor) else 0


class _PureOnly(TorchDispatchMode):
    """Refuses to draw random numbers, operators of the user, which may read anything, and results of many bytes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_pure(func):
            raise NotImplementedError(f"{func} may have another result at the next call")
        _require_small(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _require_small(func: Any, args: Any, kwargs: Any) -> None:
    """Raise if the results would take much memory. On a meta tensor, nothing is computed."""

    def on_meta(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    given, named = tree_map_only(torch.Tensor, on_meta, (args, dict(kwargs)))
    if "device" in named:
        named["device"] = torch.device("meta")
    try:
        results = [r for r in tree_leaves(func(*given, **named)) if isinstance(r, torch.Tensor)]
    except RuntimeError:  # what depends on values, such as `item`, or has no rule for meta tensors
        return
    if any(result.untyped_storage().nbytes() > _MAX_BYTES for result in results):
        raise NotImplementedError(f"a result of {func} takes too much memory")


def computed(nodes: Collection[fx.Node]) -> dict[fx.Node, Any]:
    """The values of independent nodes; none if one of them cannot be computed now."""
    values: dict[fx.Node, Any] = {}
    level, region = 0, None
    with _disable_current_modes(), torch.no_grad(), _PureOnly():  # type: ignore[no-untyped-call]
        try:
            for node in nodes:
                if name_of(node) == OPEN and not level:
                    region = EqualPlaces.of(node, nodes, values)
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
                values[node] = called(node, args, kwargs) if region is None else region.called(node, args, kwargs)
                level += (name_of(node) == OPEN) - (name_of(node) == CLOSE)
        except Exception:  # noqa: BLE001 - any operator of a user may be here
            return {}
        finally:
            for _ in range(level):
                torch._C._functorch._vmap_decrement_nesting()
    return values
