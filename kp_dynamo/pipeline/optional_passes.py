"""Passes of this package that are off by default, for the command line, where they have names only."""

from __future__ import annotations

from kp_dynamo.passes.base import GraphPass
from kp_dynamo.passes.flash_attention import FlashAttention

OPTIONAL_PASSES: dict[str, type[GraphPass]] = {FlashAttention.name: FlashAttention}
"""Name -> the pass."""
