"""A divided graph: its distinct pieces, and the order in which they run."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from kp_dynamo.blocks.node_effects import Effects
from kp_dynamo.blocks.schedule import Schedule
from kp_dynamo.capture.capture import Capture
from kp_dynamo.graph.sizes import tensor_bytes


@dataclass(frozen=True)
class Undivided:
    """The graph stays whole.

    Attributes:
        reason: Why.
    """

    reason: str


@dataclass(frozen=True)
class Piece:
    """A part of the graph that is compiled by itself.

    Attributes:
        capture: Its graph and inputs.
        num_calls: Number of its calls.
        runs: How many times it runs.
        layers: The number of equal layers that a run computes.
        module: The module of its first call, "" if it belongs to none.
        modules: The paths of the modules that the runs compute, one for each layer; "" for the model itself.
        effects: What running it once does: FLOPs and bytes.
        call: The call of a child module that it is (`block_calls`); its graph is not compiled then.
    """

    capture: Capture
    num_calls: int
    runs: int
    layers: int
    module: str
    modules: tuple[str, ...]
    effects: tuple[Effects, ...]
    call: fx.Node | None = None


@dataclass(frozen=True)
class Division:
    """A graph as pieces, and the order in which they run.

    Attributes:
        pieces: The distinct pieces; a block that occurs several times is one.
        schedule: The steps.
        written: Positions of the inputs that the graph writes to.
    """

    pieces: tuple[Piece, ...]
    schedule: Schedule
    written: tuple[int, ...]

    @property
    def passed_bytes(self) -> int:
        """Bytes that pass from piece to piece in a call."""
        given = ((piece.runs, piece.capture.inputs[i]) for piece in self.pieces for i in piece.capture.passed or ())
        return sum(runs * tensor_bytes(value) for runs, value in given)

    @property
    def reads_written_inputs_again(self) -> bool:
        """Whether several steps read an input that the graph writes to."""
        given = [number for step in self.schedule.steps for number in set(step.inputs)]
        return any(given.count(number) > 1 for number in self.written)
