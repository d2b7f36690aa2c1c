"""Lowerings by their name in `options={"lowering": ...}`."""

from __future__ import annotations

from kp_dynamo.lowering.base import Lowering
from kp_dynamo.lowering.openxla import OpenXla
from kp_dynamo.lowering.stock import Stock

_LOWERINGS: dict[str, Lowering] = {"openxla": OpenXla(), "stock": Stock()}


def get_lowering(name: str) -> Lowering:
    """The lowering called `name` (validated by `CompileOptions`)."""
    return _LOWERINGS[name]
