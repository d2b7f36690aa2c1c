"""Events of a session's compilations, for an observer: `explain` records them, others pass `ignore`.

Events go to the observer of their own session, not through a global. So two sessions, or two threads that use different
sessions, never see each other's events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from kp_dynamo.cache.compile_key import CompileKey
from kp_dynamo.lowering import Executable
from kp_dynamo.passes.base import PassReport


@dataclass(frozen=True)
class CaptureReady:
    """A graph that Dynamo captured is ready to be called.

    Attributes:
        number: Its number among the captures that AOTAutograd traced; None on a capture cache hit.
        key: Its key in the capture cache; None if only AOTAutograd's graphs may be looked up.
        seconds: Time spent, including everything below AOTAutograd.
        input_names: Its inputs, as the user's code names them.
        is_loaded: Whether the disk cache had it: AOTAutograd and the passes did not run.
    """

    number: int | None
    key: CompileKey | None
    seconds: float
    input_names: tuple[str, ...] = ()
    is_loaded: bool = False


class PieceRuns(NamedTuple):
    """A piece of a divided capture: its own capture, its size, how often it runs, and where it comes from.

    Attributes:
        capture: The number of the piece among the captures that AOTAutograd traced; None on a capture cache hit.
        module: The module of its first operator, "" if it belongs to none.
        num_operators: The operators in Dynamo's graph.
        runs: How many times it runs in a call.
        modules: The paths of the modules that the runs compute, one for each layer; "" for the model itself.
        layers: The number of equal layers in a run.
    """

    capture: int | None
    module: str
    num_operators: int
    runs: int
    modules: tuple[str, ...]
    layers: int = 1


@dataclass(frozen=True)
class CaptureDivided:
    """A graph that Dynamo captured was looked at for repeated layers.

    Attributes:
        pieces: What it was divided into, in the order of their first call; empty if it stays whole.
        reason: Why it stays whole, or "".
    """

    pieces: tuple[PieceRuns, ...]
    reason: str


@dataclass(frozen=True)
class GraphTransformed:
    """The passes ran on a graph, `label` "1.joint" or "1.inference"."""

    label: str
    reports: tuple[PassReport, ...]
    seconds: float


@dataclass(frozen=True)
class ProgramReady:
    """A graph, `label` "1.forward", is ready to run for one set of shapes.

    Attributes:
        label: Number of the capture and name of the graph.
        gm: The graph as it is lowered.
        key: Its key in the program cache, for this set of shapes.
        is_cacheable: Whether the key identifies the graph's text, and not only this object.
        is_hit: Whether it shares the program of an equal graph.
        executable: The program.
    """

    label: str
    gm: fx.GraphModule
    key: CompileKey
    is_cacheable: bool
    is_hit: bool
    executable: Executable


Event = CaptureReady | CaptureDivided | GraphTransformed | ProgramReady
Observe = Callable[[Event], None]


def ignore(_: Event) -> None:
    """An observer that does nothing."""
