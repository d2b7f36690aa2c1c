"""A divided graph whose lengths are padded to buckets: true lengths reach each piece, and results are sliced once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kp_dynamo.blocks.division import Division, Undivided
from kp_dynamo.blocks.schedule import Schedule
from kp_dynamo.buckets.bucketing import Bucketing
from kp_dynamo.buckets.symbolic_sizes import example_value, is_symbolic
from kp_dynamo.capture.capture import Capture


def reason_against_padding(division: Division, capture: Capture, *, strict: bool) -> str | None:
    """Why the padded form of a graph stays whole, before its pieces are traced: only the whole graph writes back."""
    if strict:
        return "strict=True raises for a piece that cannot be padded, although the whole graph may be"
    inputs = capture.gm.graph.find_nodes(op="placeholder")
    written = [example_value(inputs[position]) for position in division.written]
    if any(map(is_symbolic, (size for value in written for size in value.shape))):
        return "it writes to an input of such a length"
    returned = [inputs[r] for r in division.schedule.results if isinstance(r, int) and r < len(inputs)]
    if any(isinstance(example_value(node), torch.Tensor) for node in returned):
        return "it returns an input"
    return None


@dataclass(frozen=True)
class PaddedPieces:
    """The padded forms of a divided graph and of its pieces.

    Attributes:
        whole: Pads the inputs and slices the results.
        pieces: Of each piece; None if it has no varying size.
    """

    whole: Bucketing
    pieces: tuple[Bucketing | None, ...]

    def around(self, schedule: Schedule, compiled: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        """A callable that takes the padded inputs and the true lengths of the whole graph."""
        symbols = self.whole.symbols
        self.whole.join([piece for piece in self.pieces if piece is not None])
        used = [[symbols.index(name) for name in piece.symbols] if piece is not None else [] for piece in self.pieces]

        def run(*args: Any) -> list[Any]:
            count = len(args) - len(symbols)
            lengths = args[count:]
            pieces = [
                partial(_called_with, piece, tuple(lengths[i] for i in positions))
                for piece, positions in zip(compiled, used, strict=True)
            ]
            return list(schedule.around(pieces)(*args[:count]))

        return run


def padded_pieces(
    division: Division, whole: Bucketing | None, pieces: Sequence[Bucketing | None]
) -> PaddedPieces | Undivided | None:
    """The padded forms, or why the graph stays whole; None if nothing is padded. If one piece cannot be, none may be.

    Args:
        division: The pieces, which have been traced.
        whole: The padded form of the whole graph.
        pieces: Those of its pieces.
    """
    if whole is None:
        return None
    for piece, padded in zip(division.pieces, pieces, strict=True):
        # Without its length as a dimension of an input, the padding of a value cannot be told.
        missing = _lengths(piece.capture) - set(padded.symbols if padded is not None else ())
        if missing or (padded is not None and padded.is_refused) or not _lengths(piece.capture) <= set(whole.symbols):
            return Undivided("its lengths are padded to buckets, and a piece cannot be padded by itself")
    return PaddedPieces(whole, tuple(pieces))


def _lengths(capture: Capture) -> set[str]:
    """The names of the lengths that the sizes in a piece depend on: each is one of its inputs."""
    sizes = (value for value in capture.inputs if isinstance(value, torch.SymInt))
    return {str(symbol) for size in sizes for symbol in size.node.expr.free_symbols}


def _called_with(piece: Callable[..., Any], lengths: tuple[Any, ...], *args: Any) -> Any:
    return piece(*args, *lengths)
