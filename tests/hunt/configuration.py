"""How a program is compiled: options of the backend, where its tensors are, what is dynamic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

_LEVELS: tuple[dict[str, Any], ...] = (
    {"precision": "float32"},
    {"level": "balanced"},
    {"level": "conservative"},
    {"level": "aggressive"},
    {"level": "aggressive", "precision": "float32"},
)
BUCKETS: tuple[Any, ...] = ("pow2", [4, 8, 16], [8, 24], {"min": 4, "max": 16, "step": 4})


@dataclass(frozen=True)
class Configuration:
    """One way to compile a program.

    Attributes:
        options: Of `torch.compile(backend="kp_tpu", options=...)`.
        device: "cpu" or "xla".
        dynamic: Of `torch.compile`; None where sizes are marked instead, or nothing varies.
        is_marked: Sizes that vary are marked with `mark_sequence` before each call.
        is_poisoned: Padding is filled with what would show.
        is_sharded: The process has four devices, and inputs are sharded over them.
        sharding: How, see `sharding.shard`.
        compiles_children: By `compile_blocks`, and not by `torch.compile`.
    """

    options: dict[str, Any]
    device: str
    dynamic: bool | None
    is_marked: bool
    is_poisoned: bool
    is_sharded: bool
    sharding: str = "first"
    compiles_children: bool = False

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> Configuration:
        return Configuration(**fields)

    @property
    def has_buckets(self) -> bool:
        return "buckets" in self.options

    @property
    def rounding(self) -> str:
        """What may be rounded to bfloat16: "nothing", "matmul" or "all"."""
        if self.options.get("precision") == "float32":
            return "nothing"
        return "all" if self.options.get("level") == "aggressive" else "matmul"


@st.composite
def configurations(draw: Any, *, is_sharded: bool) -> Configuration:
    """Configurations, the plainest first; buckets in somewhat less than half of them."""
    options = dict(draw(st.sampled_from(_LEVELS)))
    has_buckets = draw(st.sampled_from((False, False, False, True, True)))
    if has_buckets:
        options["buckets"] = draw(st.sampled_from(BUCKETS))
    checkpoint = draw(st.sampled_from((None,) * 6 + ("off", "attention", "blocks", "auto", 0.0, 0.5)))
    if checkpoint is not None:
        options["checkpoint"] = checkpoint
    if draw(st.sampled_from((False, False, False, True))):
        options["donate"] = "mutated"
    blocks = draw(st.sampled_from((None, None, "off", "on", "on", 2)))
    if blocks is not None:
        options["blocks"] = blocks
    device = draw(st.sampled_from(("cpu", "xla")))
    dynamic, is_marked = draw(st.sampled_from(_PADDED if has_buckets else _STATIC))
    is_static = not has_buckets and not is_marked and dynamic is not True and not is_sharded
    return Configuration(
        options=options,
        device="xla" if is_sharded else device,
        dynamic=dynamic,
        is_marked=is_marked,
        is_poisoned=has_buckets and draw(st.booleans()),
        is_sharded=is_sharded,
        sharding=draw(st.sampled_from(("first", "first", "last", "grid", "whole"))) if is_sharded else "first",
        compiles_children=is_static and draw(st.sampled_from((False, True))),
    )


# With dynamic=True widths vary too, and much is refused by name: state that is written, tables, reshapes.
_PADDED = (*[(None, True)] * 6, (True, False))
_STATIC = ((None, False), (None, False), (None, False), (True, False), (None, True), (False, False))
