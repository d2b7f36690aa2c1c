"""Trace a graph with placeholder tensors and classify each program input and graph output.

The trace does not use the user's tensors, so it executes nothing, copies nothing and does not touch pending work.
`program_inputs` maps each input of the program to its argument.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from kp_dynamo.compat import xla
from kp_dynamo.graph.view_chain import base_of
from kp_dynamo.lowering.base import LoweringSpec
from kp_dynamo.lowering.donation import Donation, mark, plan
from kp_dynamo.lowering.interpreter import OnNode, ShardedInterpreter, XlaInterpreter, ignore, tracing
from kp_dynamo.lowering.pinned_results import pinned
from kp_dynamo.lowering.program_inputs import InputIds, Slot, classify_inputs, require_read
from kp_dynamo.lowering.random_state import num_draws
from kp_dynamo.lowering.tensor_shardings import is_uneven, sharded_placeholder


@dataclass
class Trace:
    """A traced graph. It holds tensors without buffers: drop it before anything synchronizes the device.

    Attributes:
        roots: The program's results, in order, without duplicates.
        inputs: One slot per program input.
        outputs: One slot per graph output.
        fallbacks: Nodes that XLA cannot lower. If there are any, the other fields are empty.
        donation: The inputs whose buffers are reused for results.
        keep_alive: Placeholders, which must live until the program is compiled so that their ids are not reused.
        num_draws: See `random_state.num_draws`.
    """

    roots: list[torch.Tensor]
    inputs: list[Slot]
    outputs: list[Slot]
    fallbacks: list[fx.Node]
    donation: Donation
    keep_alive: list[Any] = field(repr=False)
    num_draws: int = 0


@contextlib.contextmanager
def without_placeholders_in_errors() -> Iterator[None]:
    """Clear the frames of an error that leaves the trace, because they would keep placeholders alive.

    While a placeholder is alive, `sync()` aborts the process in torch_xla 2.9, with stock openxla too. And an error may
    live long: in the code that caught it, in an interactive session (`sys.last_value`) or in a logger.
    """
    outer = sys.exc_info()[1]
    try:
        yield
    except BaseException as error:
        link: BaseException | None = error
        while link is not None and link is not outer:
            traceback.clear_frames(link.__traceback__)
            link = link.__cause__ or link.__context__
        raise


def trace(
    gm: fx.GraphModule,
    args: Sequence[Any],
    constants: dict[str, torch.Tensor],
    spec: LoweringSpec,
    on_node: OnNode = ignore,
) -> Trace:
    """Trace `gm` for the shapes of `args` (tensors; numbers are used as they are), and for their shardings under SPMD.

    Results from position `spec.num_returned` on may share memory with an argument. `on_node` is called with the result
    of every node.
    """
    placeholders = [_argument(a, spec.is_sharded) if isinstance(a, torch.Tensor) else a for a in args]
    fallbacks: list[fx.Node] = []

    def stand_in(node: fx.Node, node_args: Any, node_kwargs: Any) -> Any:
        fallbacks.append(node)
        return _stand_in(node.target, node_args, node_kwargs)

    known = InputIds(placeholders, constants)
    with tracing():
        interpreter = ShardedInterpreter if spec.is_sharded else XlaInterpreter
        results = interpreter(gm, xla.device(), constants, stand_in, on_node).run(*placeholders)
        flat = list(results) if isinstance(results, (list, tuple)) else [results]
        if spec.is_sharded and not fallbacks:
            flat = pinned(flat, spec.result_shardings, placeholders)
    if fallbacks:
        return Trace([], [], [], fallbacks, Donation(), [])
    known.require_unchanged()
    outputs, roots = _classify_outputs(flat, _memories(gm.graph), placeholders, known, spec)
    inputs = classify_inputs(roots, known)
    require_read(inputs, gm.graph)
    uneven = {i for i, a in enumerate(args) if spec.donate and spec.is_sharded and is_uneven(a)}
    donation = plan(inputs, outputs, spec.overwritten, uneven) if spec.donate else Donation()
    mark(placeholders, donation)
    return Trace(roots, inputs, outputs, [], donation, [placeholders, flat], num_draws())


def _argument(given: torch.Tensor, is_sharded: bool) -> torch.Tensor:
    def make() -> torch.Tensor:
        return placeholder(given.shape, given.dtype)

    return sharded_placeholder(make, given) if is_sharded else make()


def placeholder(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    # torch_xla 2.9: a tensor with a shape and no buffer. No public function creates one.
    from torch_xla.core.xla_builder import create_placeholder_tensor

    xla.xlac()
    return create_placeholder_tensor(tuple(shape), dtype)  # type: ignore[no-any-return]


def _stand_in(target: Any, args: Any, kwargs: Any) -> Any:
    """Placeholders with the shapes and dtypes that `target` would return."""

    def swap(convert: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
        return torch.utils._pytree.tree_map_only(torch.Tensor, convert, tree)

    cpu = torch.device("cpu")
    with FakeTensorMode():
        fake = swap(lambda t: torch.empty(t.shape, dtype=t.dtype), (args, kwargs))
        fake = torch.utils._pytree.tree_map_only(torch.device, lambda _: cpu, fake)
        result = target(*fake[0], **fake[1])
    return swap(lambda t: placeholder(t.shape, t.dtype), result)


def _memories(graph: fx.Graph) -> list[Any]:
    """For each result, the node whose memory it uses in eager."""
    results = graph.output_node().args[0]
    return [base_of(r) for r in results] if isinstance(results, (list, tuple)) else [base_of(results)]


def _classify_outputs(
    results: list[Any], memories: list[Any], placeholders: list[Any], known: InputIds, spec: LoweringSpec
) -> tuple[list[Slot], list[torch.Tensor]]:
    """The slot of each result, and the roots. A returned result shares memory with no argument or other result."""
    xlac = xla.xlac()
    argument_of = {id(t): Slot("argument", i) for i, t in enumerate(placeholders)}
    seen: dict[str, tuple[int, Any, bool]] = {}
    roots: list[torch.Tensor] = []
    slots: list[Slot] = []
    for position, (result, memory) in enumerate(zip(results, memories, strict=True)):
        is_saved = position >= spec.num_returned
        if not isinstance(result, torch.Tensor):
            slots.append(Slot("value", result))
        elif id(result) in argument_of or not xlac._check_tensor_need_materialization([result])[0]:
            slot = argument_of.get(id(result)) or _without_work(result, known)
            # A result saved for the backward may be the argument itself, unless the caller copies a result over it.
            may_share = is_saved and slot.value not in spec.overwritten
            slots.append(Slot("copy", slot.value) if slot.kind == "argument" and not may_share else slot)
        else:
            new = len(roots), memory, is_saved
            root, owner, was_saved = seen.setdefault(xlac._unique_id_for_ir_and_data(result), new)
            if root == len(roots):
                roots.append(result)
            may_share = owner is memory or (is_saved and was_saved)
            slots.append(Slot("root" if may_share else "root copy", root))
    return slots, roots


def _without_work(result: torch.Tensor, known: InputIds) -> Slot:
    """An output that needs no program: a constant, or a clone of an argument, whose memory a caller may write to."""
    ids, _ = xla.xlac()._get_tensors_xla_device_data_node([result])
    return (known.slot(ids[0]) if ids else None) or Slot("constant", result)
