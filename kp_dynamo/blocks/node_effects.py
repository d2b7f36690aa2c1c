"""What a node writes to, and how much it computes: found by running it on fake tensors, not from a list of operators.

A list would have to know every in-place method, every `inplace=True`, BatchNorm's statistics and every user-defined
operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import hint_int
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from kp_dynamo.blocks.watched_writes import WatchedWrites
from kp_dynamo.capture.xla_autocast import ENTER_AUTOCAST
from kp_dynamo.graph.nodes import called
from kp_dynamo.graph.sizes import tensor_bytes


@dataclass(frozen=True)
class Effects:
    """What running a node does.

    Attributes:
        writes: Positions, among the tensor operands of the node, of those it writes to.
        flops: Floating point operations of the matmuls, convolutions and attention in it.
        num_bytes: Bytes of its operands and results.
        num_calls: The calls in it: 1, or those in the graphs of a higher-order operator.
    """

    writes: tuple[int, ...] = ()
    flops: int = 0
    num_bytes: int = 0
    num_calls: int = 1


class _WatchedCalls(WatchedWrites):
    """Also counts floating point operations, as torch's `FlopCounterMode` does, which sets hooks on all modules."""

    flops = 0

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        formula = flop_registry.get(func.overloadpacket)
        if formula is None and func.namespace != "prim":  # questions about a tensor, which have no parts
            parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        self.flops += 0 if formula is None else hint_int(formula(*args, **kwargs, out_val=result))
        return result


class EffectsOfNodes(dict[fx.Node, Effects]):
    """The effects of each call, found when they are first asked for.

    Calls with equal numbers (`node_ids`) have equal effects, so that one of them is run.

    Args:
        gm: The graph, with Dynamo's fake tensors in `meta["example_value"]`.
        ids: The number of each call.
    """

    def __init__(self, gm: fx.GraphModule, ids: Mapping[fx.Node, int]) -> None:
        super().__init__()
        self._gm, self._ids = gm, ids
        self._known: dict[int, Effects] = {}
        self._mode = FakeTensorMode()

    def __missing__(self, node: fx.Node) -> Effects:
        number = self._ids[node]
        if number not in self._known:
            self._known[number] = effects_of(self._gm, node, self._mode)
        self[node] = self._known[number]
        return self[node]


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The operands of a node in order, repeated ones repeatedly: no attributes of the graph, and no autocast region."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return [operand for operand in found if operand.op != "get_attr" and operand.target is not ENTER_AUTOCAST]


def users_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that read the value of a node; none for an autocast region, which each piece enters for itself."""
    return [] if node.target is ENTER_AUTOCAST else list(node.users)


def effects_of(gm: fx.GraphModule, node: fx.Node, mode: FakeTensorMode) -> Effects:
    """The effects of one node; a node that cannot be run counts as writing to every operand."""
    operands = operands_of(node)
    values = [operand.meta.get("example_value") for operand in operands]
    num_bytes = _num_bytes([*values, node.meta.get("example_value")])
    bodies = _bodies(gm, node)
    if bodies:
        return _of_bodies(bodies, len(operands), num_bytes, mode)
    tensors = [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]
    if not tensors or any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):  # torch.func forbids writes
        return Effects(num_bytes=num_bytes)
    with mode:
        fresh = {operand: _fresh(value) for operand, value in zip(operands, values, strict=True)}
    try:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda operand: _read(gm, operand, fresh))
        with torch.random.fork_rng(devices=[]), torch.no_grad(), mode, _WatchedCalls() as watch:
            called(node, args, kwargs)
    except Exception:  # noqa: BLE001 - any operator of a user may be here, and may refuse operands without values
        return Effects(tuple(range(len(operands))), 0, num_bytes)
    written = tuple(i for i, operand in enumerate(operands) if watch.has_written(fresh[operand]))
    return Effects(written, watch.flops, num_bytes)


def _bodies(gm: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that a node hands to a higher-order operator."""
    named = (operand for operand in node.all_input_nodes if operand.op == "get_attr")
    values = (getattr(gm, str(operand.target), None) for operand in named)
    return [value for value in values if isinstance(value, fx.GraphModule)]


def _of_bodies(bodies: list[fx.GraphModule], num_operands: int, num_bytes: int, mode: FakeTensorMode) -> Effects:
    """A body that writes to anything counts as writing to all it gets."""
    inside = [
        effects_of(body, node, mode)
        for body in bodies
        for node in body.graph.nodes
        if node.op in ("call_function", "call_method", "call_module")
    ]
    writes = tuple(range(num_operands)) if any(e.writes for e in inside) else ()
    return Effects(writes, sum(e.flops for e in inside), num_bytes, sum(e.num_calls for e in inside))


def _read(gm: fx.GraphModule, operand: fx.Node, fresh: dict[fx.Node, Any]) -> Any:
    return fresh[operand] if operand in fresh else getattr(gm, str(operand.target))


def _fresh(value: Any) -> Any:
    """A new fake tensor like `value`: its version tells whether the call wrote to it."""
    if isinstance(value, torch.Tensor):
        shape, strides = _fresh(tuple(value.shape)), _fresh(value.stride())
        return torch.empty_strided(shape, strides, dtype=value.dtype, device="cpu")
    if isinstance(value, torch.SymInt):
        return hint_int(value)  # an effect that is computed with a symbolic size would add guards
    if isinstance(value, (list, tuple)):
        items = [_fresh(item) for item in value]
        return type(value)(items) if type(value) in (list, tuple) else tuple(items)
    return value


def _num_bytes(values: Any) -> int:
    return sum(map(tensor_bytes, tree_leaves(values)))
