"""XLA tensors with pending values: lazy eager work that torch_xla runs when something reads the value.

torch_xla 2.9's program key contains the operators and the order of the arguments, but not which operand is which
argument (pytorch/xla#8353): after `((a - b) * a).cpu()` it uses that program for `(a - b) * b`, with a in place of b.
The functions here add one more result, a hash of the lazy graph's text, which makes the key of each lazy graph unique.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kp_dynamo.compat import xla
from kp_dynamo.compat.same_objects import holds_same


def run_pending(tensors: Sequence[torch.Tensor]) -> None:
    """Compute the pending values of XLA tensors, as `compute` does."""
    if pending := pending_among(tensors):
        compute(pending)


def pending_among(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those of these XLA tensors whose values are pending."""
    if not tensors:
        return []
    needed = xla.xlac()._check_tensor_need_materialization(list(tensors))
    return [t for t, is_needed in zip(tensors, needed, strict=True) if is_needed]


def compute_only(pending: list[torch.Tensor]) -> None:
    """Compute these pending XLA tensors, and leave others pending."""
    if pending:
        xla.xlac()._xla_sync_multi([*pending, _key_of(pending)], [], True)


def compute(pending: list[torch.Tensor]) -> None:
    """Compute these pending XLA tensors, and outside a backward all that is pending on the device.

    Anything left pending would grow: nothing reads the state of an eager optimizer, so its lazy graph, which contains
    that of the parameters, would get longer with each step and need a new program each time.

    In a backward, autograd runs the nodes of the device in a thread of their own, and those of CPU tensors in that of
    the caller. torch_xla 2.9 fails if one thread computes every live tensor while the other makes one.
    """
    if torch._C._current_graph_task_id() == -1:  # no backward: torch has no public name for it
        key = _key_of(pending)
        xla.xlac()._xla_sync_live_tensors(str(key.device), [], wait=True)
    else:
        compute_only(pending)


def _key_of(pending: list[torch.Tensor]) -> torch.Tensor:
    """A number that makes the program unique, as a result of it: it must live until the program has run."""
    text = xla.xlac()._get_xla_tensors_text(pending)
    return _constant(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))  # exact in float64


class OwnBuffers:
    """Gives parameters that share a buffer, such as those of a deep copy, their own before a program reads them.

    torch_xla 2.9 tracks the sharing only until a program reads the copy. The source's next in-place update then donates
    the buffer, and the copy loses it; torch_xla's own bridge has this bug too. `torch_xla.sync()` has the same effect
    as this class.
    """

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[torch.Tensor]] = {}
        self._known: set[int] = set()
        self._holds_same: Callable[[Sequence[torch.Tensor]], bool] | None = None

    def checker(self) -> Callable[[Sequence[torch.Tensor]], None]:
        """A function that checks the parameters that are new to the program, and at its first call every value.

        It runs at every call, whose parameters are mostly those of an earlier one.
        """
        are_known = self._known.issuperset
        positions: list[int] | None = None

        def check(values: Sequence[torch.Tensor]) -> None:
            nonlocal positions
            same = self._holds_same
            if same is not None and same(values):
                return
            if positions is None:
                _separate(values)
                positions = [i for i, v in enumerate(values) if isinstance(v, torch.nn.Parameter)]
            given = [values[i] for i in positions]
            if same is None or not are_known(map(id, given)):
                self._add(given)
                self._holds_same = holds_same(values, positions)

        return check

    def _add(self, given: Sequence[torch.Tensor]) -> None:
        new = {id(tensor): tensor for tensor in given if id(tensor) not in self._known}
        _separate(list(new.values()))
        self._refs |= {number: weakref.ref(tensor, self._forgetting(number)) for number, tensor in new.items()}
        self._known.update(new)

    def _forgetting(self, number: int) -> Callable[[Any], None]:
        """A callback that drops an id when its tensor dies, because another tensor may get the id."""

        def forget(_: Any) -> None:
            self._holds_same = None
            self._known.discard(number)
            self._refs.pop(number, None)

        return forget


def _separate(tensors: Sequence[torch.Tensor]) -> None:
    xlac = xla.xlac()
    texts = [(t, xlac._get_xla_tensor_debug_info(t)) for t in tensors if t.device.type == "xla"]
    shared = [t for t, text in texts if "XLAData: None" in text and "] xla::device_data" in text]
    if shared:
        xlac._xla_sync_multi(shared, [], True)


def _constant(number: int) -> torch.Tensor:
    """A number as a constant of its program: as an argument, it would not be in the key."""
    xlac = xla.xlac()
    before = xlac._get_xla_all_numbers_special_scalars()
    xlac._set_xla_all_numbers_special_scalars(True)
    try:
        return torch.full((), float(number), dtype=torch.float64, device=xla.device())
    finally:
        xlac._set_xla_all_numbers_special_scalars(before)
