"""The values of the inputs of each piece of a divided capture, for the option `ledger`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kp_dynamo.blocks.division import Division, Piece
from kp_dynamo.capture.capture import Capture
from kp_dynamo.ledger import NotComparable, copies_on_cpu, eagerly

logger = logging.getLogger(__name__)


def with_values(division: Division, capture: Capture) -> Division:
    """The division, whose pieces know what their first run is called with.

    The pieces run eagerly on copies of the arguments, once. If one of them cannot, the others that need its results are
    not compared.
    """
    seen: dict[int, tuple[Any, ...]] = {}
    if (arguments := copies_on_cpu(capture.values)) is not None:
        run = division.schedule.around([_noting(piece, i, seen) for i, piece in enumerate(division.pieces)])
        try:
            with eagerly(), torch.no_grad():
                run(*arguments)
        except NotComparable as reason:
            logger.debug("not all pieces are compared: %s", reason)
    pieces = [replace(p, capture=replace(p.capture, values=seen.get(i))) for i, p in enumerate(division.pieces)]
    return replace(division, pieces=tuple(pieces))


def _noting(piece: Piece, number: int, seen: dict[int, tuple[Any, ...]]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        if number not in seen:
            seen[number] = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)
        if piece.call is not None:
            raise NotComparable("a child module is compiled by itself")  # and is compared there
        try:
            return piece.capture.gm(*args)
        except Exception as cause:
            # Operators may raise anything; the pieces are compiled all the same.
            raise NotComparable(f"a piece raised {type(cause).__name__}: {cause}") from cause

    return run
