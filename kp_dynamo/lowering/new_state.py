"""Under SPMD: how tensors lie that a program overwrites before anything computed them, as AdamW's first averages.

An optimizer makes its state by `zeros_like`, which torch_xla would compute whole on every device. A new value of an
argument lies as the argument does, so the state would stay whole, twice the size of the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kp_dynamo.lowering.pending import compute_only, pending_among
from kp_dynamo.lowering.pinned_results import pin_pending
from kp_dynamo.lowering.spmd import WHOLE
from kp_dynamo.lowering.tensor_shardings import shardings


def divide_new_state(args: Sequence[Any], used_by: Mapping[int, Sequence[int]]) -> None:
    """Divide pending arguments like the argument whose new value is computed from theirs.

    Args:
        args: The arguments of a call; the pending ones are annotated in place.
        used_by: For overwritten arguments, the others of the same sizes whose new values are computed from theirs.
    """
    on_xla = {i: args[i] for i in used_by if isinstance(args[i], torch.Tensor) and args[i].device.type == "xla"}
    pending = {id(a) for a in pending_among(list(on_xla.values()))}
    new = {i for i, a in on_xla.items() if id(a) in pending and not isinstance(a, torch.nn.Parameter)}
    if not new:
        return
    known = [i for i, a in on_xla.items() if i not in new]
    known += sorted({i for n in new for i in used_by[n]} - new - set(known))
    compute_only(pending_among([args[i] for i in known]))
    texts = dict(zip(known, shardings([args[i] for i in known]), strict=True))
    for i in new:
        found = {texts[user] for user in used_by[i] if user in texts}
        if len(found) == 1 and found != {WHOLE}:
            pin_pending(args[i], found.pop())
