"""Inserts nodes into a graph, with a correct fake value and the origin of the node they replace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import extract_tensor_metadata
from torch.utils import _pytree as pytree

_PER_NODE_META = ("val", "tensor_meta", "original_aten", "from_node", "added_by_cast_bf16", "one_pass")

Insert = Callable[..., fx.Node]
"""`insert_call` with a graph."""


def insert_call(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    like: fx.Node | None,
    runs: FakeRuns | None = None,
    value: Any = None,
) -> fx.Node:
    """Add a call at the graph's insertion point.

    The node takes its origin (stack trace, module stack, partitioner tag) from `like`. Its `meta["val"]` is `value`, or
    else the result of running `target` on the fake tensors of its arguments; `runs` caches the results of equal calls.
    A call without tensor arguments has no fake mode to run in: it needs a `value`.
    """
    node = graph.call_function(target, args, dict(kwargs))
    node.meta = _origin(like)
    if value is not None:
        set_value(node, value)
    else:
        (runs or FakeRuns()).set_value(node)
    return node


def insert_attribute(gm: fx.GraphModule, name: str, value: torch.Tensor, *, like: fx.Node) -> fx.Node:
    """Store a constant under an unused name like `name`, and read it at the graph's insertion point.

    The node takes its origin and its fake value from `like`.
    """
    while hasattr(gm, name):
        name += "_"
    gm.register_buffer(name, value)
    node = gm.graph.get_attr(name)
    node.meta = _origin(like)
    set_value(node, like.meta["val"])
    return node


def cast_to(node: fx.Node, dtype: torch.dtype, *, like: fx.Node | None, runs: FakeRuns | None = None) -> fx.Node:
    """`node` if it has that dtype already, else a cast of it at the graph's insertion point."""
    if node.meta["val"].dtype == dtype:
        return node
    return insert_call(node.graph, torch.ops.aten._to_copy.default, (node,), {"dtype": dtype}, like=like, runs=runs)


def _origin(like: fx.Node | None) -> dict[str, Any]:
    return {} if like is None else {key: value for key, value in like.meta.items() if key not in _PER_NODE_META}


def run_on_fakes(node: fx.Node) -> Any:
    """The result of a call on the fake tensors of its arguments."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda source: source.meta["val"])
    # C++ kernels specialize symbolic sizes to their hints; the Python ones do not.
    symbolic = enable_python_dispatcher() if _has_symbolic_size((args, kwargs)) else contextlib.nullcontext()
    with torch.no_grad(), symbolic:
        return node.target(*args, **kwargs)  # type: ignore[operator]  # a call_function's target is a function


def _has_symbolic_size(arguments: Any) -> bool:
    leaves = pytree.tree_leaves(arguments)
    sizes = (size for x in leaves for size in (x.shape if isinstance(x, torch.Tensor) else (x,)))
    return any(isinstance(size, torch.SymInt) for size in sizes)


class FakeRuns:
    """Runs calls on fake tensors and caches those of static shapes: a model's blocks repeat the same slow runs.

    Nodes of equal calls share one fake tensor and its metadata.
    """

    def __init__(self) -> None:
        self._values: dict[Any, dict[str, Any]] = {}

    def set_value(self, node: fx.Node) -> None:
        """Set the value of `node` to the result of its call."""
        node.meta.update(self._meta_of(node))

    def value_of(self, node: fx.Node) -> Any:
        """The result of the call of `node`."""
        return self._meta_of(node)["val"]

    def _meta_of(self, node: fx.Node) -> dict[str, Any]:
        call = (node.target, call_key(node.args), call_key(node.kwargs))
        try:
            known = call in self._values
        except TypeError:  # symbolic sizes are unhashable
            return _meta(run_on_fakes(node))
        if not known:
            self._values[call] = _meta(run_on_fakes(node))
        return self._values[call]


def call_key(argument: Any) -> Any:
    """A key that distinguishes the arguments of calls: nodes, fake tensors, numbers and containers of these.

    With a symbolic size it is unhashable.
    """
    if isinstance(argument, fx.Node):
        return call_key(argument.meta["val"])
    if isinstance(argument, torch.Tensor) and argument.layout is torch.strided:
        place = tuple(argument.shape), argument.stride(), argument.storage_offset()
        flags = argument.requires_grad, argument.is_conj(), argument.is_neg()
        return type(argument), place, argument.dtype, argument.device, flags
    if isinstance(argument, Mapping):
        return tuple((name, call_key(value)) for name, value in argument.items())
    if isinstance(argument, (list, tuple)):
        return tuple(call_key(value) for value in argument)
    return type(argument), argument


def set_value(node: fx.Node, value: Any) -> None:
    """Set the value of a node, in both places that torch's partitioners read."""
    node.meta.update(_meta(value))


def _meta(value: Any) -> dict[str, Any]:
    return {"val": value} | ({"tensor_meta": extract_tensor_metadata(value)} if isinstance(value, torch.Tensor) else {})


def check_values(graph: fx.Graph) -> None:
    """Run every operator of a graph on fake tensors.

    Raises:
        ValueError: An operator rejects its arguments, or its result does not match `meta["val"]`.
    """
    runs = FakeRuns()
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or not node.all_input_nodes:
            continue
        try:
            value = runs.value_of(node)
        except Exception as cause:
            raise ValueError(f"running {node.name} on fake tensors failed: {str(cause).splitlines()[0]}") from cause
        kept = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not _has_same_type(value, kept):
            raise ValueError(f"{node.name} returns {_kind(value)}, but its meta['val'] is {_kind(kept)}")


def _has_same_type(value: torch.Tensor, kept: Any) -> bool:
    return isinstance(kept, torch.Tensor) and (kept.dtype, kept.shape) == (value.dtype, value.shape)


def _kind(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def replace_node(node: fx.Node, by: fx.Node) -> None:
    """Make the users of `node` read `by`, then erase `node` and the sources that become unused, except inputs."""
    node.replace_all_uses_with(by)
    erase_unused(node)


def erase_unused(node: fx.Node) -> None:
    """Erase a node without users, then the sources that become unused; keep inputs and nodes with side effects."""
    sources = node.all_input_nodes
    if node._erased or node.users or node.is_impure():  # a source of two erased nodes is visited twice
        return
    node.graph.erase_node(node)
    for source in sources:
        erase_unused(source)
