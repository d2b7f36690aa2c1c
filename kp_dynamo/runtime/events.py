"""What happens while a session compiles, told to whoever asked: `explain` listens, others pass `ignore`.

Events travel through the session that causes them and not through a global, so that two sessions, or two threads
that use different ones, never hear of each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from kp_dynamo.cache.key_diff import CompileKey
from kp_dynamo.lowering import Executable
from kp_dynamo.passes.base import PassReport


@dataclass(frozen=True)
class CaptureReady:
    """A graph of Dynamo's can be called.

    Attributes:
        number: Which one of those that went through AOTAutograd; None where an equal capture was found before it.
        key: What it was looked up by; None where only AOTAutograd's own graphs may be looked up.
        seconds: Time spent, everything below AOTAutograd included.
    """

    number: int | None
    key: CompileKey | None
    seconds: float


@dataclass(frozen=True)
class GraphTransformed:
    """The passes ran on a graph, `label` "1.joint" or "1.inference"."""

    label: str
    reports: tuple[PassReport, ...]
    seconds: float


@dataclass(frozen=True)
class ProgramReady:
    """A graph, `label` "1.forward", can be run for one set of shapes.

    Attributes:
        label: Number of the capture and name of the graph.
        gm: The graph as it is lowered.
        key: What it was looked up by, for this set of shapes.
        is_cacheable: The key is of the graph's text, not of this one object.
        is_hit: An equal graph had been compiled, and its program is shared.
        executable: The program.
    """

    label: str
    gm: fx.GraphModule
    key: CompileKey
    is_cacheable: bool
    is_hit: bool
    executable: Executable


Event = CaptureReady | GraphTransformed | ProgramReady
Observe = Callable[[Event], None]


def ignore(_: Event) -> None:
    """The listener of a session that nobody asks about."""
