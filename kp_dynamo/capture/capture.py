"""Prepares what Dynamo captured: the device of its tensors and results, and its cache key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, check_node_safe
from torch._subclasses.fake_tensor import FakeTensor

from kp_dynamo.cache.call_parts import input_parts, mode_parts, shares_storage
from kp_dynamo.cache.compile_key import Parts
from kp_dynamo.cache.graph_text import graph_text, is_known_operator
from kp_dynamo.cache.identity import Uncacheable
from kp_dynamo.cache.lasting_key import LastingText, lasting_text
from kp_dynamo.capture.class_dimension import move_classes_last
from kp_dynamo.capture.cpu_view import retarget_to_cpu
from kp_dynamo.capture.divided_batch import divide_batch
from kp_dynamo.capture.exponents import specialize_exponents
from kp_dynamo.capture.held_tensors import lift_held_tensors
from kp_dynamo.capture.inactive_dropout import remove_inactive_dropout
from kp_dynamo.capture.inputs_on_cpu import (
    PlacementOf,
    has_static_sizes,
    inputs_on_cpu,
    is_fake,
    is_parameter,
    placement,
)
from kp_dynamo.capture.masked_writes import select_masked_writes
from kp_dynamo.capture.nested_regions import inline_nested_regions
from kp_dynamo.capture.nested_tensors import refuse_nested_tensors
from kp_dynamo.capture.tensor_devices import placement_mode
from kp_dynamo.capture.views_as_real import copy_views_of_view_as_real
from kp_dynamo.compat import xla
from kp_dynamo.graph.operand_devices import name_of_value


@dataclass(frozen=True)
class Capture:
    """A Dynamo graph as if it were on the CPU, and what is needed to call it on the device of its tensors.

    Attributes:
        gm: The graph, with its device arguments set to the CPU.
        inputs: The graph inputs; XLA tensors are replaced by CPU fake tensors.
        mode: Where the tensors are: "cpu" (the backend places them), "xla", or "fake" (they have no values).
        held: Tensors that Dynamo's graph held itself; they are now its first inputs.
        moved_results: (position, device) of results that eager returns on another device than the others.
        key: Text and input metadata that decide the whole compilation; None if AOTAutograd adds guards or reads
            values, so that only its own graphs may be looked up.
        passed: For a piece of a divided graph, the positions of its inputs that other pieces compute. None for a whole
            graph.
        stays_on_device: Whether values that pass between pieces stay on the device, although the others are placed.
        values: The arguments of the call that is compiled, where they are, for the option `ledger`; else None.
        lasting: The graph's text in the key of the disk cache; None without a disk cache.
    """

    gm: fx.GraphModule
    inputs: list[Any]
    mode: str
    held: list[torch.Tensor]
    moved_results: tuple[tuple[int, torch.device], ...]
    key: Parts | None
    passed: frozenset[int] | None = None
    stays_on_device: bool = False
    values: tuple[Any, ...] | None = None
    lasting: LastingText | None = None

    @property
    def parameters(self) -> frozenset[int]:
        """The positions of the inputs that are parameters."""
        return frozenset(i for i, x in enumerate(self.inputs) if is_parameter(x))

    @property
    def placements(self) -> dict[int, tuple[Any, ...]]:
        """How the parameters lie of which that is known, by their positions."""
        found = {i: placement(self.inputs[i]) for i in self.parameters}
        return {i: where for i, where in found.items() if where is not None}

    @property
    def records_gradients(self) -> bool:
        """Whether a backward may follow."""
        wanted = any(isinstance(x, torch.Tensor) and x.requires_grad for x in self.inputs)
        sets_grad = (n for n in self.gm.graph.nodes if n.target is torch._C._set_grad_enabled)
        return wanted and (torch.is_grad_enabled() or any(node.args[0] for node in sets_grad))


def read_capture(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    with_modules: bool,
    with_values: bool = False,
    placement_of: PlacementOf | None = None,
    lasting: bool = False,
) -> Capture:
    """Read what Dynamo captured.

    Args:
        gm: Dynamo's graph. Its device arguments are rewritten.
        inputs: The graph inputs.
        with_modules: Whether passes read the modules that nodes came from, so that these enter the key.
        with_values: Whether passes are measured with the values of the inputs.
        placement_of: How a parameter lies on several devices.
        lasting: Whether the capture may be kept for other processes.

    Raises:
        TPUDeviceError: Inputs on several devices, or on one that is neither the CPU nor XLA.
        XLACompilationError: A nested tensor.
    """
    refuse_nested_tensors(gm, inputs)
    divide_batch(gm)
    inline_nested_regions(gm)
    held = [*gm.parameters(), *gm.buffers()]
    tensors = [x for x in [*held, *inputs] if isinstance(x, torch.Tensor)]
    results = _result_devices(gm)
    mode = placement_mode(tensors, next((d.type for _, d in results), "cpu"), _names(gm, inputs))
    if any(is_fake(t) for t in tensors):
        mode = "fake"
    if mode == "xla" and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        xla.require_backward()
    moved = tuple((i, device) for i, device in results if device.type != ("cpu" if mode == "fake" else mode))
    key = _early_key(gm, inputs, moved, with_modules) if not held else None
    kept = _lasting(gm, key, with_modules) if lasting else None
    specialize_exponents(gm)
    remove_inactive_dropout(gm)
    move_classes_last(gm)
    select_masked_writes(gm)
    retarget_to_cpu(gm, mode)
    if mode == "xla":
        copy_views_of_view_as_real(gm)
    gm, lifted = lift_held_tensors(gm) if mode == "xla" and held else (gm, [])
    values = (*lifted, *inputs) if with_values else None
    fakes = inputs_on_cpu([*lifted, *inputs], placement_of)
    return Capture(gm, fakes, mode, lifted, moved, key, values=values, lasting=kept)


def piece_capture(
    whole: Capture, gm: fx.GraphModule, inputs: list[Any], passed: frozenset[int], *, stays: bool, with_modules: bool
) -> Capture:
    """The capture of a piece of `whole`.

    Args:
        whole: The capture that is divided.
        gm: The graph of the piece.
        inputs: Its inputs, as in a capture.
        passed: See `Capture`.
        stays: Whether values that pass between pieces stay on the device. They may not if gradients are recorded:
            autograd would run the backward of device tensors in a thread of its own, beside the one that moves
            gradients to the device, and torch_xla 2.9 allows one such thread.
        with_modules: As for `read_capture`.
    """
    key = _early_key(gm, inputs, (), with_modules)
    kept = _lasting(gm, key, with_modules) if whole.lasting is not None else None
    key = None if key is None else (*key, ("passed", tuple(sorted(passed)) if stays else "as arguments"))
    return Capture(gm, inputs, whole.mode, [], (), key, passed, stays, lasting=kept)


def _names(gm: fx.GraphModule, inputs: Sequence[Any]) -> dict[int, str]:
    """The names of the tensors that a graph reads, by their ids."""
    named = {id(x): name for name, x in (*gm.named_parameters(), *gm.named_buffers())}
    placeholders = gm.graph.find_nodes(op="placeholder")
    return named | {id(x): name_of_value(node) for x, node in zip(inputs, placeholders, strict=False)}


def _result_devices(gm: fx.GraphModule) -> list[tuple[int, torch.device]]:
    returned: Any = gm.graph.output_node().args[0]
    values = [n.meta.get("example_value") if isinstance(n, fx.Node) else None for n in returned]
    return [(i, v.device) for i, v in enumerate(values) if isinstance(v, torch.Tensor)]


def _early_key(gm: fx.GraphModule, inputs: Sequence[Any], moved: object, with_modules: bool) -> Parts | None:
    """The key for a look-up before AOTAutograd, if that is right: static shapes, plain tensors, no shared storage.

    User-defined operators are also excluded: AOTAutograd runs their fake kernel and backward, which may be
    re-registered, or read state that has changed.
    """
    if any(not _is_plain(x) for x in inputs) or shares_storage(inputs) or _has_numbers(gm):
        return None
    try:
        _check_safe(gm)
        text = graph_text(gm, with_modules=with_modules)
    except (Uncacheable, BypassAOTAutogradCache, AttributeError):  # torch 2.9 does not handle every kind of target
        return None
    modes = mode_parts()
    if dict(modes)["saved tensor hooks"]:
        return None
    return (("inputs", input_parts(inputs)), ("graph", text), ("moved", str(moved)), *modes)


def _lasting(gm: fx.GraphModule, key: Parts | None, with_modules: bool) -> LastingText:
    if key is None:
        return LastingText(refusal="it has no key")
    return lasting_text(gm, with_modules=with_modules)


def _is_plain(value: Any) -> bool:
    """A plain tensor of static shape; numbers among the inputs imply symbolic shapes."""
    if type(value) is FakeTensor and not is_fake(value):  # an input of a piece of a divided graph
        return all(isinstance(size, int) for size in value.shape)
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return has_static_sizes(value)


def _has_numbers(gm: fx.GraphModule) -> bool:
    """Whether the graph computes a number that varies from call to call: AOTAutograd may specialize on its value.

    Dynamo passes a float as a tensor, which looks like any other.
    """
    return any(isinstance(n.meta.get("example_value"), _NUMBERS) for n in gm.graph.nodes)


_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _check_safe(gm: fx.GraphModule) -> None:
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                check_node_safe(node)
                if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
                    _check_known(node.target)


def _check_known(target: Any) -> None:
    if not is_known_operator(target):
        raise Uncacheable(f"{target} is a user-defined operator")


def with_dynamo_signature(
    run: Callable[..., Any],
    capture: Capture,
    laid_out: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """`run` with the held tensors passed in, and with results moved to their devices (differentiably).

    Args:
        run: The callable, which takes the held tensors first.
        capture: What it was compiled from.
        laid_out: Makes a callable whose results lie in memory as eager's. It comes after the moves, which copy each
            result by itself.
    """
    if capture.moved_results:
        run = _moving(run, capture.moved_results)
    if laid_out is not None:
        run = laid_out(run)
    held = capture.held
    return (lambda *args: run(*held, *args)) if held else run


def _moving(run: Callable[..., Any], moved: Sequence[tuple[int, torch.device]]) -> Callable[..., Any]:
    def called(*args: Any) -> list[Any]:
        results = list(run(*args))
        for position, device in moved:
            results[position] = results[position].to(device)
        return results

    return called
