"""The autograd function of a graph that only returns new tensors: AOTAutograd's, with half of its work at a call.

At every call, AOTAutograd's own (torch 2.9) looks for what few graphs have: written inputs, aliases, subclasses,
symbolic sizes, tokens, states of generators. A graph without them only saves tensors and calls two programs. Where
equal layers are compiled once, a training step calls one such function for each layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # first: torch 2.9 cannot import the next module without it
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd
from torch._functorch._aot_autograd.schemas import OutputType

from kp_dynamo.autograd.backward_nodes import NodeHook, nodes_given_to

Run = Callable[[list[Any]], Any]

_NEW = (OutputType.non_alias, OutputType.unsafe_view_alias)
_ABSENT = (
    "mutated_inp_runtime_indices",
    "mutated_graph_handled_indices_seen_by_autograd",
    "num_intermediate_bases",
    "tokens",
    "num_backward_tokens",
    "num_graphsafe_rng_states",
    "is_rng_op_functionalized",
    "dynamic_outputs",
    "dynamic_saved_tensors_idxs",
    "indices_of_inputs_that_requires_grad_with_mutations_in_bw",
)
"""What AOTAutograd's metadata of a graph must not have."""


class PlainGradient:
    """The programs of a graph that only returns new tensors, as one differentiable function.

    Args:
        forward: Returns the results of the graph, then the tensors that the backward reads.
        backward: Takes those tensors and the gradients of the results; returns a gradient or None for each argument.
        metadata: AOTAutograd's metadata of the graph.
        detached: Arguments that get no gradient, and through which the results must not require one.
        at_node: Each is given the backward node of each call.
    """

    def __init__(
        self, forward: Run, backward: Run, metadata: Any, detached: Sequence[int], at_node: Sequence[NodeHook]
    ) -> None:
        self.forward, self.backward, self._detached, self.at_node = forward, backward, tuple(detached), at_node
        self.num_results = len(metadata.output_info)
        self.without_gradient = [i for i, info in enumerate(metadata.output_info) if not info.requires_grad]
        self.with_gradient = [i for i, info in enumerate(metadata.output_info) if info.requires_grad]

    def __call__(self, args: list[Any]) -> Any:
        for i in self._detached:
            if isinstance(args[i], torch.Tensor):
                args[i] = args[i].detach()
        if torch._C._are_functorch_transforms_active():  # torch's error
            return CompiledFunction.apply(self, *args)  # type: ignore[no-untyped-call]
        return _apply(self, *[_unwrap(a) if isinstance(a, torch.Tensor) else a for a in args])


class CompiledFunction(torch.autograd.Function):
    """Its name is that of AOTAutograd's function, which users see in `grad_fn`."""

    @staticmethod
    def forward(ctx: Any, graph: PlainGradient, *args: Any) -> tuple[Any, ...]:
        for hook in graph.at_node:
            hook(ctx)
        results = graph.forward(list(args))
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        saved = results[graph.num_results :]
        if any(map(_is_view, saved)):  # a saved view would keep alive the graph that its base belongs to
            saved = [t.detach() if t._is_view() else t for t in saved]
        ctx.save_for_backward(*saved)
        if graph.without_gradient:
            ctx.mark_non_differentiable(*[results[i] for i in graph.without_gradient])
        if len(graph.with_gradient) > 1:
            ctx.kinds = [(results[i].shape, results[i].dtype) for i in graph.with_gradient]
        return tuple(results[: graph.num_results])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _backward(ctx, gradients)


# Dynamo must trace neither the backward nor what runs it. Cheaper than `torch._dynamo.disable`, at every call.
set_code_exec_strategy(CompiledFunction.backward.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
# Without torch's own wrapper, which takes as long as the programs of a small layer.
_apply: Callable[..., Any] = super(torch.autograd.Function, CompiledFunction).apply
_unwrap: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.unwrap_if_dead
_is_view: Callable[[torch.Tensor], bool] = torch.Tensor._is_view


def _backward(ctx: Any, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradients of the graph and its arguments: all undefined if those of the results are, as in eager."""
    _refuse_transforms()
    graph: PlainGradient = ctx.graph
    if all(gradient is None for gradient in gradients):
        return (None,) * len(ctx.needs_input_grad)
    args = [*ctx.saved_tensors, *_given(ctx, gradients)]
    ctx.maybe_clear_saved_tensors()
    if torch.is_grad_enabled() and any(t.requires_grad for t in args):
        return (None, *_Once.apply(graph.backward, *args))  # type: ignore[no-untyped-call]
    return (None, *graph.backward(args))


def _given(ctx: Any, gradients: tuple[Any, ...]) -> Sequence[Any]:
    """The gradients of the results that have one, with zeros for undefined ones."""
    found = [gradients[i] for i in ctx.graph.with_gradient]
    if all(gradient is not None for gradient in found):
        return found
    device = next(gradient.device for gradient in found if gradient is not None)
    return [
        torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
        for gradient, (shape, dtype) in zip(found, ctx.kinds, strict=True)
    ]


class _Once(torch.autograd.Function):
    """A backward under `create_graph=True`: its results require gradients, and have none."""

    @staticmethod
    def forward(ctx: Any, backward: Run, *args: Any) -> tuple[Any, ...]:
        return tuple(backward(list(args)))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("torch.compile with aot_autograd does not currently support double backward")


def _refuse_transforms() -> None:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "a compiled backward was called within torch.func's vmap, grad or vjp, which cannot look into it. "
            "Try: compile the function that calls the transform."
        )


@dataclass
class Gradients:
    """How AOTAutograd made a graph differentiable.

    Attributes:
        plain: What replaces AOTAutograd's function; None if that is used, or if there is no backward.
        detached: See `PlainGradient`.
        disables_amp: Whether the programs run without autocast.
        has_extras: Whether there are tensor subclasses, symbolic sizes or states of a backward.
        at_node: Each is given the backward node of each call.
    """

    plain: PlainGradient | None = None
    detached: tuple[int, ...] = ()
    disables_amp: bool = False
    has_extras: bool = False
    at_node: list[NodeHook] = field(default_factory=list)


@contextlib.contextmanager
def plain_gradients(parts: Callable[[], tuple[Run, Run]]) -> Iterator[Gradients]:
    """While AOTAutograd compiles a graph, use `PlainGradient` where it is right.

    Args:
        parts: Returns what the forward and the backward were compiled to, once they are.
    """
    made = Gradients()
    stock = AOTDispatchAutograd.post_compile

    def post_compile(
        forward_func: Any, backward_func: Any, subclasses: Any, num_sizes: int, states: list[int], disable_amp: bool,
        detached: list[int], *args: Any, fw_metadata: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        run = stock(
            forward_func, backward_func, subclasses, num_sizes, states, disable_amp, detached, *args,
            fw_metadata=fw_metadata, **kwargs,
        )  # fmt: skip
        made.detached, made.disables_amp = tuple(detached), disable_amp
        made.has_extras = subclasses is not None or bool(num_sizes) or bool(states)
        if made.has_extras or not _is_plain(fw_metadata):
            return run
        made.plain = PlainGradient(*parts(), fw_metadata, detached, made.at_node)
        return _if_recorded(made.plain, run)

    patched = mock.patch.object(AOTDispatchAutograd, "post_compile", staticmethod(post_compile))
    with patched, nodes_given_to(made.at_node):
        yield made


def _if_recorded(plain: PlainGradient, run: Run) -> Run:
    """`plain`, or AOTAutograd's `run` for a graph that records gradients although its caller does not."""

    def called(args: list[Any]) -> Any:
        return plain(args) if torch.is_grad_enabled() else run(args)

    called._boxed_call = True  # type: ignore[attr-defined]
    return called


def _is_plain(metadata: Any) -> bool:
    has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    if has_hooks or metadata.grad_enabled_mutation is not None or any(getattr(metadata, name) for name in _ABSENT):
        return False
    return all(map(_is_new_tensor, metadata.output_info))


def _is_new_tensor(info: Any) -> bool:
    is_tensor = isinstance(info.raw_type, type) and issubclass(info.raw_type, torch.Tensor)
    return is_tensor and info.output_type in _NEW
