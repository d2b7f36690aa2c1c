"""What the layers above may know of a lowering."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import fx


@dataclass(frozen=True)
class LoweringSpec:
    """How a graph is to be lowered; every field is part of the compile key, or follows from it.

    Attributes:
        name: Name of the graph, for profilers and messages ("forward", "backward", "inference").
        num_returned: Results that the caller sees. Those after it are saved for a backward, and may share memory
            with an argument.
        matmul_precision: "default", "high" or "highest": passes over the MXU for a float32 product.
        strict: An operator that XLA lacks raises instead of running on the CPU.
        identity: Text that no two graphs share which compute different things.
        overwritten: The arguments that the first results are copied over by the caller; None where the caller does
            something else with a result.
        donate: Whether results may take the buffers of the arguments that are overwritten.
        is_sharded: Whether the program runs on several devices, for the shardings of its arguments.
    """

    name: str
    num_returned: int
    matmul_precision: str
    strict: bool
    identity: str = ""
    overwritten: tuple[int | None, ...] = ()
    donate: bool = False
    is_sharded: bool = False


@dataclass
class Executable:
    """A compiled graph for one set of shapes.

    Attributes:
        run: Takes the graph's arguments (XLA tensors; CPU tensors are transferred) and returns its outputs.
        num_programs: XLA programs behind it; more than one where operators run on the CPU in between.
        fallbacks: ATen operators that run on the CPU, each with the user's source line.
        seconds: Time spent, by stage ("trace", "xla"); grows where parts are compiled at their first run.
        moved_bytes: Bytes that moved between device and CPU so far, for each of `fallbacks`.
        donated: Arguments whose buffers become results: on the device they are gone after a run.
        kept: Arguments that the graph overwrites and that are not donated all the same, each with the reason.
    """

    run: Any
    num_programs: int
    fallbacks: tuple[tuple[str, str], ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    moved_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    donated: tuple[int, ...] = ()
    kept: tuple[tuple[int, str], ...] = ()


class Lowering(Protocol):
    """Turns a functional ATen graph on CPU fake tensors into something that runs on the XLA device."""

    name: str

    def compile(self, gm: fx.GraphModule, args: Sequence[Any], spec: LoweringSpec) -> Executable:
        """Compile `gm` for the shapes of `args`; executes nothing of it."""
        ...
