"""The levels: presets of options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["conservative", "balanced", "aggressive"]
CastScope = Literal["linear", "matmul", "all"]


@dataclass(frozen=True)
class LevelPreset:
    """The defaults that a level sets; options that the user sets take precedence."""

    cast_scope: CastScope
    fuse: bool
    checkpoint: str


LEVELS: dict[Level, LevelPreset] = {
    "conservative": LevelPreset(cast_scope="linear", fuse=False, checkpoint="off"),
    "balanced": LevelPreset(cast_scope="matmul", fuse=True, checkpoint="auto"),
    "aggressive": LevelPreset(cast_scope="all", fuse=True, checkpoint="auto"),
}
