"""Canonical text of a graph: equal texts mean equal graphs.

The text omits node names. It has every operator, argument, constant, edge, shape, stride and dtype, and
the graphs inside higher-order operators. A graph is uncacheable if any part has no stable text.
"""

from __future__ import annotations

import hashlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from kp_dynamo.cache.identity import Uncacheable, is_of_library, number_of
from kp_dynamo.cache.tensor_bytes import tensor_bytes

# The key hashes the bytes of attributes up to this size; a graph with a larger one is not shared.
MAX_CONSTANT_BYTES = 1 << 20

FunctionText = Callable[[Any], str]


def graph_text(gm: fx.GraphModule, *, with_modules: bool = False, function: FunctionText | None = None) -> str:
    """One line per node: `%3: float32[2, 3]/(3, 1) = aten.add.Tensor(%0, int:2)`.

    Args:
        gm: The graph.
        with_modules: Whether to append the module each node came from, for passes that read it.
        function: The text of an operator, a function or a class; by default one for this process.

    Raises:
        Uncacheable: A node holds an object that has no stable text.
    """
    number = {node: f"%{i}" for i, node in enumerate(gm.graph.nodes)}
    text = function or callable_text
    lines = [f"{number[node]}: {node_text(gm, node, number, text)}" for node in gm.graph.nodes]
    if with_modules:
        modules = [list(dict(node.meta.get("nn_module_stack") or {}).values()) for node in gm.graph.nodes]
        lines = [f"{line} # {[path for path, _ in stack]}" for line, stack in zip(lines, modules, strict=True)]
    return "\n".join(lines)


def node_text(
    gm: fx.GraphModule, node: fx.Node, number: Mapping[fx.Node, str], function: FunctionText | None = None
) -> str:
    """The text of one node, without its own number; `number` has the text of the nodes that it reads.

    Raises:
        Uncacheable: The node holds an object that has no stable text.
    """
    if node.op == "get_attr":
        return f"= attribute({_attribute_text(gm, str(node.target), function)})"
    if node.op == "call_module":
        raise Uncacheable(f"it calls the module {node.target}, which a graph only names")
    function = function or callable_text
    # The text omits names of placeholders and outputs, but not of methods and modules.
    target = node.op if node.op in ("placeholder", "output") else f"{_kind(node)}{_text(node.target, number, function)}"
    arguments = ", ".join(
        [_text(a, number, function) for a in node.args]
        + [f"{k}={_text(v, number, function)}" for k, v in node.kwargs.items()]
    )
    value = node.meta.get("val", node.meta.get("example_value"))
    return f"{_value_text(value)} = {target}({arguments if node.op != 'placeholder' else ''})"


def _kind(node: fx.Node) -> str:
    return "" if node.op == "call_function" else f"{node.op}:"


def _attribute_text(gm: fx.GraphModule, name: str, function: FunctionText | None) -> str:
    value: Any = gm
    for part in name.split("."):
        value = getattr(value, part)
    if isinstance(value, fx.GraphModule):
        return "{" + graph_text(value, function=function) + "}"
    if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter):
        return f"{tensor_text(value)} {_bytes_text(value)}"
    raise Uncacheable(f"attribute {name} of type {type(value).__name__}")


def _bytes_text(tensor: torch.Tensor) -> str:
    if tensor.device.type != "cpu" or tensor.numel() * tensor.element_size() > MAX_CONSTANT_BYTES:
        raise Uncacheable(f"a constant on {tensor.device} with {tensor.numel()} elements")
    # A fake mode is active while AOTAutograd compiles, and would reject a constant, which is a real tensor.
    with torch.utils._python_dispatch._disable_current_modes():
        dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
        data = tensor_bytes(dense).numpy().data
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def tensor_text(tensor: torch.Tensor) -> str:
    """Dtype, shape, strides, layout and requires_grad of a tensor: all that compilation may depend on."""
    if tensor.layout is not torch.strided:
        return f"{tensor.dtype}[{list(tensor.shape)}] {tensor.layout}"
    grad = " grad" if tensor.requires_grad else ""
    return f"{tensor.dtype}{list(tensor.shape)}/{tensor.stride()}{grad}"


def _value_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return tensor_text(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_value_text(v) for v in value)})"
    return repr(value) if isinstance(value, _NUMBERS) else ""


_NUMBERS = (int, float, complex, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (
    *_NUMBERS, str, bytes, type(None), type(...), torch.dtype, torch.layout, torch.memory_format, torch.device,
)  # fmt: skip

_EXACT = frozenset((int, float, bool, str, type(None), torch.dtype))


def _text(value: Any, number: Mapping[fx.Node, str], function: FunctionText) -> str:
    if isinstance(value, fx.Node):
        return number[value]
    if type(value) in _EXACT:  # most arguments: without the questions below
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(_text(v, number, function) for v in value)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_text(v, number, function)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({_text([value.start, value.stop, value.step], number, function)})"
    # `0.0 == -0.0` and `1 == True`, but they give different programs: the text has type and repr.
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__}:{value!r}"
    return function(value)


def callable_text(value: Any) -> str:
    """The text of an operator, or of a function or a class of a library, which lasts as long as the process.

    Raises:
        Uncacheable: It is anything else.
    """
    if isinstance(value, torch._ops.HigherOrderOperator):
        return str(value)
    if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return _operator_text(value)
    if isinstance(value, (types.BuiltinFunctionType, types.FunctionType, type)) and is_of_library(value):
        return _function_text(value)
    raise Uncacheable(f"an argument of type {type(value).__name__}")


def _operator_text(target: torch._ops.OpOverload | torch._ops.OpOverloadPacket) -> str:
    """The name of an operator; a user-defined one also has its number, because it may be redefined.

    A user-defined operator runs at every call (`lowering/interpreter.py`), unless it has an XLA kernel, which is part
    of the program.
    """
    if is_of_torch(target):
        return str(target)
    if isinstance(target, torch._ops.OpOverload) and has_xla_kernel(target):
        raise Uncacheable(f"{target} has an XLA kernel, which may be registered again")
    return f"{target}#{number_of(target)}"


def is_known_operator(target: Any) -> bool:
    """Whether an operator has a namespace of torch, of torch_xla or of this package."""
    return _namespace(target) in (*_OWN_NAMESPACES, *_SHARED_NAMESPACES)


def is_of_torch(target: Any) -> bool:
    """Whether an operator belongs to torch or to this package, so that its name says what it does."""
    is_operator = isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
    return is_operator and _namespace(target) in _OWN_NAMESPACES


def _namespace(target: torch._ops.OpOverload | torch._ops.OpOverloadPacket) -> str:
    packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
    return str(packet._qualified_op_name.partition("::")[0])


def has_xla_kernel(target: torch._ops.OpOverload) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "XLA"))


_OWN_NAMESPACES = frozenset(("aten", "prim", "kp"))
_SHARED_NAMESPACES = frozenset(("prims", "rngprims", "xla", "torch_xla", "_c10d_functional"))
"""Python defines their operators, as a user may."""


def _function_text(value: Any) -> str:
    """A function or class of a library; its number changes if the name is rebound."""
    name = f"{value.__module__}.{value.__qualname__}"
    owner = getattr(value, "__self__", None)
    is_method = owner is not None and not isinstance(owner, types.ModuleType | type)
    if (is_method or "<" in name) and is_at_its_name(value):  # torch._C._log_api_usage_once, F.max_pool2d
        name = f"{value.__module__}.{value.__name__}"
    elif is_method:
        raise Uncacheable(f"a method of an object of type {type(owner).__name__}")
    if "<" in name:
        raise Uncacheable(f"an argument of type {type(value).__name__}")
    return name if isinstance(value, types.BuiltinFunctionType) else f"{name}#{number_of(value)}"


def is_at_its_name(value: Any) -> bool:
    """Whether a function or a class is what its module has under its name."""
    return getattr(sys.modules.get(str(value.__module__)), str(value.__name__), None) is value
