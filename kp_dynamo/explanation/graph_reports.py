"""The parts of an explanation: plain frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kp_dynamo.graph.edit_example import EditExample
from kp_dynamo.graph.places import Place
from kp_dynamo.passes.base import PassErrors


@dataclass(frozen=True)
class UncompiledFrame:
    """A function that Dynamo gave up, so that it ran eagerly.

    Attributes:
        line: The line at which Dynamo gave up, or the beginning of the function: "model.py:12 in forward".
        reason: Why, in Dynamo's words.
    """

    line: str
    reason: str


@dataclass(frozen=True)
class GraphBreak:
    """A graph break of Dynamo.

    Attributes:
        line: Such as "model.py:12 in forward"; "" if Dynamo reports none.
        source: The text of that line.
        reason: Dynamo's own explanation, several lines.
    """

    line: str
    source: str
    reason: str


@dataclass(frozen=True)
class CaptureReport:
    """One graph captured by Dynamo.

    Attributes:
        number: The first part of the names of its lowered graphs; None if it shares those of an earlier, equal
            capture.
        key: Digest of its key; "" if captures cannot be looked up and only AOTAutograd's graphs can.
        is_hit: Whether an equal capture is cached, so that AOTAutograd does not run.
        why_missed: The nearest cached key and the difference.
        seconds: Compile time, including all later stages.
        changes: If the same operators are cached for other inputs, what differs: "batch['input_ids'] is [8, 513], was
            [8, 512]".
    """

    number: int | None
    key: str
    is_hit: bool
    why_missed: str
    seconds: float
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PieceReport:
    """A piece of a graph that was divided at repeated layers.

    Attributes:
        capture: The number of its capture; None if it is cached.
        module: The module of its first operator, "" if it belongs to none.
        num_operators: Its operators in Dynamo's graph.
        runs: How many times a call runs it.
        modules: The paths of the modules that the runs compute, one for each layer; "" for the model itself.
        layers: The number of equal layers in a run.
    """

    capture: int | None
    module: str
    num_operators: int
    runs: int
    modules: tuple[str, ...] = ()
    layers: int = 1


@dataclass(frozen=True)
class DivisionReport:
    """Whether one captured graph was divided at repeated layers.

    Attributes:
        pieces: In the order of their first run; empty if the graph stays whole.
        reason: Why it stays whole, or "".
    """

    pieces: tuple[PieceReport, ...]
    reason: str


@dataclass(frozen=True)
class PassOnGraph:
    """What one pass did to one graph.

    Attributes:
        graph: Name of the graph, such as "1.joint".
        name: Name of the pass.
        rewritten: Number of matches rewritten.
        refused: Pairs (node, reason) for matches that the pass left alone.
        notes: What it decided.
        places: The place of each of `refused` in the model.
        errors: What it did to the numbers; None without the option `ledger`.
        example: Some operators before and after; only the first graph that the pass changed has one.
    """

    graph: str
    name: str
    rewritten: int
    refused: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()
    places: tuple[Place, ...] = ()
    errors: PassErrors | None = None
    example: EditExample | None = None


@dataclass(frozen=True)
class GraphReport:
    """One graph as it was lowered, for one set of shapes.

    Attributes:
        name: Number of its capture, and "forward", "backward" or "inference".
        key: Digest of its key; "" if the graph has no stable text, so that its program is not shared.
        is_hit: Whether an equal graph is cached.
        why_missed: The nearest cached key and the difference.
        num_operators: Number of operators in the graph.
        casts: Number of dtype casts among them, by "float32 -> bfloat16".
        num_programs: XLA programs compiled for it, 0 if it shares those of an earlier graph.
        seconds: Time spent, by stage ("trace", "xla").
    """

    name: str
    key: str
    is_hit: bool
    why_missed: str
    num_operators: int
    casts: dict[str, int]
    num_programs: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class FallbackReport:
    """An operator that falls back to the CPU, at one line.

    Attributes:
        graph: Name of the graph.
        op: Name of the operator.
        line: The user's line.
        moved_bytes: Bytes copied for it in this run. Adjacent operators run on the CPU together; their bytes are
            counted for the first of them.
        modules: The modules that run the line, such as "layers.0.attn (Attention)".
    """

    graph: str
    op: str
    line: str
    moved_bytes: int
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class WholeTensor:
    """A large tensor that every device holds whole, although programs run on several.

    Attributes:
        name: The path of a parameter or buffer, or "x of 1.forward": an argument of a program.
        dtype: Such as "float32".
        shape: Its sizes.
        size_bytes: What each device holds.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


def pass_from_dict(content: Mapping[str, Any]) -> PassOnGraph:
    """The inverse of `dataclasses.asdict` for a PassOnGraph.

    Raises:
        KeyError, TypeError: The content is not a PassOnGraph.
    """
    refused = tuple((node, reason) for node, reason in content["refused"])
    places = tuple(Place(**place) for place in content["places"])
    errors, example = content.get("errors"), content.get("example")
    of_ledger = None if errors is None else PassErrors.from_dict(errors)
    edited = None if example is None else EditExample.from_dict(example)
    plain = {
        "refused": refused, "notes": tuple(content["notes"]), "places": places, "errors": of_ledger, "example": edited,
    }  # fmt: skip
    return PassOnGraph(**{**content, **plain})


def fallback_from_dict(content: Mapping[str, Any]) -> FallbackReport:
    """The inverse of `dataclasses.asdict` for a FallbackReport.

    Raises:
        KeyError, TypeError: The content is not a FallbackReport.
    """
    return FallbackReport(**{**content, "modules": tuple(content["modules"])})
