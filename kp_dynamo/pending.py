"""XLA tensors whose value is still a recipe: eager work that torch_xla carries out when somebody needs it.

torch_xla 2.9 keeps a program by a key that says which operators there are and in which order arguments come, and not
which operand is which argument (pytorch/xla#8353): after `((a - b) * a).cpu()` it takes that program for `(a - b) * b`,
with a in the place of b. Here a number goes along that is made of the recipe's text, as one more result: it gives each
recipe a key of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from kp_dynamo import compat


def settle(tensors: Sequence[torch.Tensor]) -> None:
    """Give XLA tensors their values now; where one has none yet, all others of the device too."""
    if not tensors:
        return
    needed = compat.xlac()._check_tensor_need_materialization(list(tensors))
    if pending := [t for t, is_needed in zip(tensors, needed, strict=True) if is_needed]:
        compute(pending)


def compute(pending: list[torch.Tensor]) -> None:
    """Give XLA tensors that have no value yet their values, and with them all that is pending on the device.

    What is left would grow: the state of an optimizer that runs eagerly is never asked for, and its recipe, which that
    of the parameters contains, becomes longer with each step, and a program of its own.
    """
    xlac = compat.xlac()
    text = xlac._get_xla_tensors_text(pending)
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")  # exact in float64
    key = _constant(number)  # alive until the program has run, of which it is a result
    xlac._xla_sync_live_tensors(str(key.device), [], wait=True)


def _constant(number: int) -> torch.Tensor:
    """A number that is a part of its program: otherwise it is an argument, and not in the key."""
    xlac = compat.xlac()
    before = xlac._get_xla_all_numbers_special_scalars()
    xlac._set_xla_all_numbers_special_scalars(True)
    try:
        return torch.full((), float(number), dtype=torch.float64, device=compat.device())
    finally:
        xlac._set_xla_all_numbers_special_scalars(before)
