"""The memory a graph takes at the very least, known before XLA has seen it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from kp_dynamo.exceptions import TPUOutOfMemoryError
from kp_dynamo.graph.source_lines import source_line
from kp_dynamo.hardware import GB, Chip

_NUM_SHOWN = 5


@dataclass(frozen=True)
class MemoryBudget:
    """What a program may use of a chip's memory."""

    chip: Chip
    num_bytes: float


@dataclass(frozen=True)
class IoTensor:
    """A tensor that a program holds from its start or to its end.

    Attributes:
        role: "argument" or "result".
        text: Dtype and shape.
        num_bytes: Its size, unpadded.
        line: The user's line that first reads or makes it.
    """

    role: str
    text: str
    num_bytes: int
    line: str

    def __str__(self) -> str:
        where = f" at {self.line}" if self.line else ""
        return f"{self.role} {self.text} of {self.num_bytes / GB:.2f} GB{where}"


def held_by(graph: fx.Graph) -> list[IoTensor]:
    """Arguments and results of a graph, the largest first: a program has memory for all of them when it ends.

    Padding to the chip's tiles and temporaries come on top. Sizes that are not known yet count as none.
    """
    arguments = [n for n in graph.nodes if n.op == "placeholder"]
    returned = next(n for n in graph.nodes if n.op == "output").all_input_nodes
    held = [*_held("argument", arguments), *_held("result", (n for n in returned if n.op != "placeholder"))]
    return sorted(held, key=lambda h: -h.num_bytes)


def _held(role: str, nodes: Iterator[fx.Node] | list[fx.Node]) -> Iterator[IoTensor]:
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape):
            text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            reader = next(iter(node.users), node) if role == "argument" else node
            yield IoTensor(role, text, value.numel() * value.element_size(), source_line(reader))


def require_room(graph: fx.Graph, name: str, budget: MemoryBudget) -> int:
    """Bytes that a graph holds at least.

    Raises:
        TPUOutOfMemoryError: They are more than the budget: no compiler can make it fit.
    """
    held = held_by(graph)
    needed = sum(h.num_bytes for h in held)
    if needed <= budget.num_bytes:
        return needed
    largest = "; ".join(_counted(held)[:_NUM_SHOWN])
    raise TPUOutOfMemoryError(
        f"the {name} program takes at least {needed / GB:.2f} GB, in {len(held)} arguments and results alone; allowed "
        f"are {budget.num_bytes / GB:.2f} GB of the {budget.chip.hbm_bytes / GB:.2f} GB of a {budget.chip.name}. "
        f"The largest: {largest}. {REMEDIES}"
    )


def _counted(held: list[IoTensor]) -> list[str]:
    """Each kind of tensor once, with its number: a model's blocks are alike."""
    counts = Counter(map(str, held))
    return [text if count == 1 else f"{count} x {text}" for text, count in counts.items()]


REMEDIES = (
    'Remedies: a smaller batch or sequence; in training, activations computed again (checkpoint="blocks" or "auto"); '
    'parameters in bfloat16 (model.bfloat16()); a chip with more memory (target="v5p").'
)
