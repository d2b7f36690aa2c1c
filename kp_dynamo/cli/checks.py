"""A check of `doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "failed"]


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    status: Status
    message: str
