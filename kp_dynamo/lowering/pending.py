"""XLA tensors whose value is still a recipe: eager work that torch_xla carries out when somebody needs it.

torch_xla 2.9 keeps a program by a key that says which operators there are and in which order arguments come, and not
which operand is which argument (pytorch/xla#8353): after `((a - b) * a).cpu()` it takes that program for `(a - b) * b`,
with a in the place of b. Here a number goes along that is made of the recipe's text, as one more result: it gives each
recipe a key of its own.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kp_dynamo.compat import xla


def run_pending(tensors: Sequence[torch.Tensor]) -> None:
    """Give XLA tensors their values now; where one has none yet, all others of the device too."""
    if not tensors:
        return
    needed = xla.xlac()._check_tensor_need_materialization(list(tensors))
    if pending := [t for t, is_needed in zip(tensors, needed, strict=True) if is_needed]:
        compute(pending)


def compute(pending: list[torch.Tensor]) -> None:
    """Give XLA tensors that have no value yet their values, and with them all that is pending on the device.

    What is left would grow: the state of an optimizer that runs eagerly is never asked for, and its recipe, which that
    of the parameters contains, becomes longer with each step, and a program of its own.
    """
    xlac = xla.xlac()
    text = xlac._get_xla_tensors_text(pending)
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")  # exact in float64
    key = _constant(number)  # alive until the program has run, of which it is a result
    xlac._xla_sync_live_tensors(str(key.device), [], wait=True)


class OwnBuffers:
    """Gives parameters that share a buffer, as those of a deep copy do, one of their own before a program reads them.

    torch_xla 2.9 knows of the sharing until a program reads the copy. Then it gives the buffer away with the source's
    next update in place, and the copy has none: with its own bridge too. `torch_xla.sync()` does the same as this.
    """

    def __init__(self) -> None:
        self._parameters: slice | list[int] | None = None
        self._last: tuple[int, ...] = ()
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}

    def ensure(self, values: Sequence[torch.Tensor]) -> None:
        """Check the parameters that are new to the program, and at its first call every value."""
        if self._parameters is None:
            self._parameters = _positions(values)
            _separate(values)
        places = self._parameters
        given = values[places] if isinstance(places, slice) else [values[i] for i in places]
        ids = tuple(map(id, given))
        if ids == self._last:
            return
        new = {number: tensor for number, tensor in zip(ids, given, strict=True) if number not in self._known}
        self._known |= {number: weakref.ref(tensor, self._forgetting(number)) for number, tensor in new.items()}
        self._last = ids
        _separate(list(new.values()))

    def _forgetting(self, number: int) -> Callable[[Any], None]:
        """Another tensor may get the id."""

        def forget(_: Any) -> None:
            self._known.pop(number, None)
            self._last = ()

        return forget


def _positions(values: Sequence[torch.Tensor]) -> slice | list[int]:
    """Those of parameters; as a slice, which is quicker, where they stand together."""
    found = [i for i, v in enumerate(values) if isinstance(v, torch.nn.Parameter)]
    is_together = found == list(range(found[0], found[-1] + 1)) if found else False
    return slice(found[0], found[-1] + 1) if is_together else found


def _separate(tensors: Sequence[torch.Tensor]) -> None:
    xlac = xla.xlac()
    texts = [(t, xlac._get_xla_tensor_debug_info(t)) for t in tensors if t.device.type == "xla"]
    shared = [t for t, text in texts if "XLAData: None" in text and "] xla::device_data" in text]
    if shared:
        xlac._xla_sync_multi(shared, [], True)


def _constant(number: int) -> torch.Tensor:
    """A number that is a part of its program: otherwise it is an argument, and not in the key."""
    xlac = xla.xlac()
    before = xlac._get_xla_all_numbers_special_scalars()
    xlac._set_xla_all_numbers_special_scalars(True)
    try:
        return torch.full((), float(number), dtype=torch.float64, device=xla.device())
    finally:
        xlac._set_xla_all_numbers_special_scalars(before)
