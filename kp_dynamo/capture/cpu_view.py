"""Dynamo's graph and inputs, seen as if everything were on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from kp_dynamo.exceptions import TPUDeviceError

_CPU = torch.device("cpu")


def retarget_to_cpu(gm: fx.GraphModule, mode: str) -> None:
    """Rewrite the device arguments of `gm`, and of the graphs inside it, from XLA to the CPU.

    Autocast regions are for a device type. If the tensors are on XLA (`mode`), a region for XLA becomes one for the
    CPU, and one for the CPU has no effect, as in eager.

    The rewrite is in place because AOTAutograd reads attributes that Dynamo set on this module and its nodes.
    """
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            moves = [node for node in module.graph.nodes if _is_move(node)]
            changed = [_rewrite_devices(node, mode) for node in module.graph.nodes]
            for node in moves:
                _copy_result(node)
            if any(changed) or moves:
                module.recompile()


def _is_move(node: fx.Node) -> bool:
    """Whether the result is on another device type than its only tensor operand, and is therefore new memory."""
    value, sources = node.meta.get("example_value"), [n.meta.get("example_value") for n in node.all_input_nodes]
    tensors = [t for t in sources if isinstance(t, torch.Tensor)]
    is_made_of_one = node.op in ("call_function", "call_method") and len(tensors) == 1
    return is_made_of_one and isinstance(value, torch.Tensor) and value.device.type != tensors[0].device.type


def copy_views_of_view_as_real(gm: fx.GraphModule) -> None:
    """Return copies of the results that are views of a `view_as_real`, for inputs on XLA.

    AOTAutograd would take such a view after the program. torch_xla 2.9 then aborts the process, as in eager code.
    """
    output = gm.graph.output_node()
    views = [node for node in output.all_input_nodes if _is_view_of_view_as_real(node)]
    for node in views:
        # Only at the output: inside the graph, a write to the view reaches its base.
        with gm.graph.inserting_before(output):
            copy = gm.graph.call_method("clone", (node,))
        copy.meta.update(node.meta)
        output.replace_input_with(node, copy)
    if views:
        gm.recompile()


def _is_view_of_view_as_real(node: fx.Node) -> bool:
    source = node
    while (above := _viewed(source)) is not None:
        if source is not node and source.target in (torch.view_as_real, torch.ops.aten.view_as_real.default):
            return True
        source = above
    return False


def _viewed(node: fx.Node) -> fx.Node | None:
    """The tensor that a node is, or may be, a view of: tensors inside `torch.func` do not expose their storage."""
    if node.op not in ("call_function", "call_method") or not node.all_input_nodes:
        return None
    above = node.all_input_nodes[0]
    one, other = (n.meta.get("example_value") for n in (node, above))
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return None
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, (one, other))):
        return above
    return above if one.untyped_storage()._cdata == other.untyped_storage()._cdata else None


def _copy_result(node: fx.Node) -> None:
    """From CPU to CPU, `to` returns the tensor itself, and a write to one would show in the other."""
    with node.graph.inserting_after(node):
        copy = node.graph.call_method("clone", (node,))
    copy.meta.update(node.meta)
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)


@contextlib.contextmanager
def surrounding_autocast(mode: str) -> Iterator[None]:
    """Apply the autocast state around the call, for the device of `mode`, to the CPU."""
    if mode != "xla":
        yield
        return
    enabled, dtype = torch.is_autocast_enabled("xla"), torch.get_autocast_dtype("xla")
    with torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=torch.is_autocast_cache_enabled()):
        yield


def _rewrite_devices(node: fx.Node, mode: str) -> bool:
    before = node.args, node.kwargs
    if node.target is torch.amp.autocast_mode._enter_autocast:
        swapped = {"xla": "cpu", "cpu": "xla"} if mode == "xla" else {}
        node.args = (swapped.get(str(node.args[0]), node.args[0]), *node.args[1:])
    else:
        node.args, node.kwargs = fx.node.map_aggregate(before, _to_cpu)
    return before != (node.args, node.kwargs)


def _is_xla(value: Any) -> bool:
    if isinstance(value, str):
        return value == "xla" or value.startswith("xla:")
    return isinstance(value, torch.device) and value.type == "xla"


def _to_cpu(value: Any) -> Any:
    if not _is_xla(value):
        return value
    return "cpu" if isinstance(value, str) else _CPU


def inputs_on_cpu(inputs: Sequence[Any]) -> list[Any]:
    """`inputs` with every XLA tensor replaced by a CPU fake tensor of the same metadata, one fake per tensor.

    Fake tensors of the caller's fake mode are replaced by fake tensors of Dynamo's.
    """
    mode = _fake_mode()
    fakes: dict[int, torch.Tensor] = {}
    for x in inputs:
        if isinstance(x, torch.Tensor) and (x.device.type == "xla" or is_fake(x)) and id(x) not in fakes:
            fakes[id(x)] = _cpu_fake(x, mode)
    return [fakes.get(id(x), x) for x in inputs]


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fake, and not Dynamo's fake for a real one."""
    return isinstance(tensor, FakeTensor) and tensor.fake_mode is not _fake_mode()


def _fake_mode() -> FakeTensorMode:
    context = TracingContext.try_get()
    return context.fake_mode if context is not None and context.fake_mode is not None else FakeTensorMode()


def _cpu_fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    is_ours = isinstance(tensor, FakeTensor) and tensor.fake_mode is mode
    like = tensor if is_ours else _dynamo_fake(tensor, mode)
    return cpu_fake(like, tensor, mode)


def cpu_fake(like: torch.Tensor, tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A new fake CPU tensor with the sizes, strides and dtype of `like`, and what autograd knows of `tensor`."""
    with torch.inference_mode(tensor.is_inference()), mode:
        fake = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
        if not tensor.requires_grad:
            return fake
        leaf = fake.requires_grad_()
        with torch.enable_grad():
            return leaf if tensor.is_leaf else leaf.clone()


def _dynamo_fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """The fake tensor that Dynamo made for `tensor`, with the symbols and sources of its sizes."""
    context = TracingContext.try_get()
    symbolic = context.tensor_to_context.get(tensor) if context is not None else None
    if symbolic is None:
        return mode.from_tensor(tensor, static_shapes=True)
    return mode.from_tensor(tensor, symbolic_context=symbolic, source=symbolic.tensor_source, trace=False)


def lift_held_tensors(gm: fx.GraphModule) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Turn the parameters and buffers that `gm` holds (in a compiled optimizer step) into its first inputs.

    Returns:
        A copy of `gm` that takes them, and the tensors in the order of the new inputs.

    Raises:
        TPUDeviceError: `gm` calls whole modules, whose tensors cannot be lifted.
    """
    held = {**dict(gm.named_parameters()), **dict(gm.named_buffers())}
    if any(node.op == "call_module" for node in gm.graph.nodes):
        raise TPUDeviceError(
            f"the captured graph calls modules that hold {len(held)} tensors on the XLA device. Allowed: graphs that "
            "take them as inputs. Try: torch._dynamo.config.inline_inbuilt_nn_modules = True, the default."
        )
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    sources: Any = gm._param_name_to_source
    lifted = {name: _input(graph, name.replace(".", "_"), sources[name]) for name in held}
    for node in gm.graph.nodes:
        if node.op == "get_attr" and node.target in lifted:
            new[node] = lifted[str(node.target)]
            new[node].meta.update(node.meta)
        elif node.op == "placeholder":
            new[node] = _input(graph, str(node.target), node._dynamo_source)
            new[node].meta.update(node.meta)
        else:
            new[node] = graph.node_copy(node, new.__getitem__)
    copy = fx.GraphModule(gm, graph)
    copy.meta.update(gm.meta)
    copy._param_name_to_source = {}  # type: ignore[assignment]
    return copy, list(held.values())


def _input(graph: fx.Graph, name: str, source: Any) -> fx.Node:
    node = graph.placeholder(name)
    # AOTAutograd reads the source of every input of Dynamo's graph.
    node._dynamo_source = source
    return node
