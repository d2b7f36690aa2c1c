"""`kp::check_indices`: the identity, but raises IndexError if an index is out of range.

    check_indices(indices, low, high, ignored, place) -> indices

A program on a TPU cannot raise: XLA clamps an index or drops the write. This operator has a kernel on the CPU alone, so
a graph that contains it is split there, and the indices are copied to the CPU and back in each call. It is for debug
runs, `options={"check_indices": True}`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("kp", "FRAGMENT")
_library.define(
    "check_indices(Tensor indices, SymInt low, SymInt high, int? ignored, str place) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def _check(indices: Tensor, low: int, high: int, ignored: int | None, place: str) -> Tensor:
    is_valid = (indices >= low) & (indices < high)
    if ignored is not None:
        is_valid |= indices == ignored
    if not is_valid.all():
        wrong = indices[~is_valid]
        allowed = f"{low} to {high - 1}" + ("" if ignored is None else f", and {ignored}, which is ignored")
        raise IndexError(
            f"{place}: {wrong.numel()} of {indices.numel()} indices are out of range, the first is {wrong[0].item()}. "
            f"Allowed: {allowed}."
        )
    return indices.clone()


_library.impl("check_indices", _check, "CPU")
torch.library.register_fake("kp::check_indices", lambda indices, *_: torch.empty_like(indices), lib=_library)
