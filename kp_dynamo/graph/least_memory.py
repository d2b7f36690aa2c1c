"""A lower bound of the memory that a graph takes, known before XLA compiles it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from kp_dynamo.exceptions import TPUOutOfMemoryError
from kp_dynamo.graph.source_lines import source_line
from kp_dynamo.hardware import CHIPS, GB, Chip

_NUM_SHOWN = 5


@dataclass(frozen=True)
class MemoryBudget:
    """How much of a chip's memory a program may use.

    Attributes:
        chip: The chip; of a v7, the half that is a device.
        num_bytes: The bytes that a program may use, of all chips together.
        checkpoint: The option, so that no remedy is one that is on already.
        num_chips: The chips that share the program; on v7, the devices.
    """

    chip: Chip
    num_bytes: float
    checkpoint: str | float = "off"
    num_chips: int = 1

    @property
    def of_what(self) -> str:
        """The memory of which it is a part."""
        total, whole = self.num_chips * self.chip.hbm_bytes / GB, CHIPS[self.chip.name]
        if self.num_chips == 1:
            return f"{total:.2f} GB of {whole.device_text('a')}"
        return f"{total:.2f} GB of {self.num_chips // whole.num_devices} {whole.name} together"


@dataclass(frozen=True)
class IoTensor:
    """A tensor that a program holds from its start, or until its end.

    Attributes:
        role: "argument" or "result".
        text: Dtype and shape.
        num_bytes: Its size, without padding.
        line: The user's line that first reads or produces it.
    """

    role: str
    text: str
    num_bytes: int
    line: str

    def __str__(self) -> str:
        where = f" at {self.line}" if self.line else ""
        return f"{self.role} {self.text} of {self.num_bytes / GB:.2f} GB{where}"


def held_by(graph: fx.Graph) -> list[IoTensor]:
    """The arguments and results of a graph, largest first: at its end a program holds all of them in memory.

    Padding to the chip's tiles and temporaries come on top. Tensors of symbolic sizes are left out.
    """
    arguments = [n for n in graph.nodes if n.op == "placeholder"]
    returned = graph.output_node().all_input_nodes
    held = [*_held("argument", arguments), *_held("result", (n for n in returned if n.op != "placeholder"))]
    return sorted(held, key=lambda h: -h.num_bytes)


def _held(role: str, nodes: Iterator[fx.Node] | list[fx.Node]) -> Iterator[IoTensor]:
    for node in nodes:
        value = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape):
            text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            reader = next(iter(node.users), node) if role == "argument" else node
            yield IoTensor(role, text, value.numel() * value.element_size(), source_line(reader))


def require_room(graph: fx.Graph, name: str, budget: MemoryBudget) -> int:
    """The least number of bytes that a graph holds.

    Raises:
        TPUOutOfMemoryError: It exceeds the budget, so no compiler can make the graph fit.
    """
    held = held_by(graph)
    needed = sum(h.num_bytes for h in held)
    if needed <= budget.num_bytes:
        return needed
    largest = "; ".join(_counted(held)[:_NUM_SHOWN])
    raise TPUOutOfMemoryError(
        f"the {name} program takes at least {needed / GB:.2f} GB for its {len(held)} arguments and results. Allowed: "
        f"{budget.num_bytes / GB:.2f} GB of the {budget.of_what}. "
        f"The largest: {largest}. {remedies(budget.checkpoint)}"
    )


def _counted(held: list[IoTensor]) -> list[str]:
    """Each kind of tensor once, with its count: a model's blocks are alike."""
    counts = Counter(map(str, held))
    return [text if count == 1 else f"{count} x {text}" for text, count in counts.items()]


def remedies(checkpoint: str | float, *others: str) -> str:
    """What to do about too little memory.

    Args:
        checkpoint: The option: what it recomputes already is no remedy.
        *others: Further remedies.
    """
    tries = ["a smaller batch or sequence", *_more_recomputation(checkpoint), *others]
    tries += ["parameters in bfloat16 (model.bfloat16())", 'a chip with more memory (target="v5p")']
    return f"Try: {'; '.join(tries)}."


def _more_recomputation(checkpoint: str | float) -> list[str]:
    match checkpoint:
        case "off" | "attention":
            return ['in training, recompute activations (checkpoint="blocks" or "auto")']
        case "blocks":
            return ['in training, recompute as much as is needed (checkpoint="auto")']
        case "auto" | 0:
            return []
        case share:
            return [f"in training, keep fewer activations (checkpoint={float(share) / 2:g})"]
