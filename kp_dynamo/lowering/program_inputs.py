"""Map each input of a traced program to an argument, the random seed or a constant.

torch_xla identifies the inputs of a program by ids. Before the trace, each argument and constant becomes a node of the
lazy graph, which fixes its id. If the trace gave two of them the same id, the checks here would raise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from kp_dynamo.compat import xla

Kind = Literal["argument", "copy", "seed", "constant", "root", "root copy", "value"]


@dataclass(frozen=True)
class Slot:
    """A program input or graph output: a value, or the position of an argument or a root that it is or copies."""

    kind: Kind
    value: Any = None


class InputIds:
    """The ids of program inputs, fixed before the trace: each tensor has its own node, which nothing can relabel."""

    def __init__(self, placeholders: list[Any], constants: dict[str, torch.Tensor]) -> None:
        arguments = [(t, Slot("argument", i)) for i, t in enumerate(placeholders) if isinstance(t, torch.Tensor)]
        self._arguments = [tensor for tensor, _ in arguments]
        self._ids = _ids(self._arguments)
        assert len(set(self._ids)) == len(arguments), "two arguments are the same program input"
        self._slots = dict(zip(self._ids, (slot for _, slot in arguments), strict=True))
        # A constant that is a number may be part of the program; then it has no id.
        self._slots |= {number: Slot("constant", t) for t in constants.values() for number in _ids([t])}
        self._slots[xla.xlac()._get_seed_info_id()] = Slot("seed")

    def require_unchanged(self) -> None:
        """Raise if an operator wrote to an argument, which would then have another id."""
        assert _ids(self._arguments) == self._ids, "an operator wrote to an argument while the graph was traced"

    def slot(self, number: int) -> Slot | None:
        """The argument, constant or seed with this id; None for any other input."""
        return self._slots.get(number)


def _ids(tensors: list[torch.Tensor]) -> list[int]:
    # torch_xla 2.9: reading a tensor's id creates its node, and the node keeps the id.
    ids: list[int] = xla.xlac()._get_tensors_xla_device_data_node(tensors)[0]
    return ids


def classify_inputs(roots: list[torch.Tensor], known: InputIds) -> list[Slot]:
    """One slot for each input of the program that computes `roots`, in the program's order."""
    if not roots:
        return []
    ids, values = xla.xlac()._get_tensors_xla_device_data_node(roots)
    slots = [known.slot(i) or _born_in_trace(value) for i, value in zip(ids, values, strict=True)]
    assert sum(slot.kind == "seed" for slot in slots) <= 1, "the program has more than one seed"
    return slots


def require_read(inputs: list[Slot], graph: fx.Graph) -> None:
    """Raise unless the program reads each argument at most once, and only arguments that the graph's results need."""
    read = [slot.value for slot in inputs if slot.kind == "argument"]
    assert len(set(read)) == len(read), "an argument is two inputs of the program"
    needed = _dependencies(graph)
    stray = [i for i, node in enumerate(graph.find_nodes(op="placeholder")) if i in set(read) and node not in needed]
    assert not stray, f"the program reads arguments {stray}, which the graph does not read"


def _dependencies(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that the results of a graph depend on."""
    found: set[fx.Node] = set()
    stack = [graph.output_node()]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                stack.append(source)
    return found


def _born_in_trace(value: torch.Tensor) -> Slot:
    """A program input that the trace created: a number that torch_xla has put into a buffer."""
    has_buffer = "Data Handle: None" not in xla.xlac()._get_xla_tensor_debug_info(value)
    assert has_buffer, "a program input is neither an argument, nor the seed, nor a constant"
    return Slot("constant", value)
