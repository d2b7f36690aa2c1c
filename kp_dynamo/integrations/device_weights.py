"""Let the modules of a model use other tensors for the time of a `with` block, such as copies on the device.

`torch.func.functional_call` does the same, but torch 2.9 leaves its tensors in a module that has two parents (T5's
embedding).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from kp_dynamo.compat import xla
from kp_dynamo.session import SESSION


@dataclass
class Swap:
    """A tensor of a module and its substitute; `own` returns to `holder[name]` at the end."""

    holder: dict[str, Any]
    name: str
    own: Any
    substitute: Tensor


@contextlib.contextmanager
def substituted(model: nn.Module, substitute_for: Callable[[Tensor], Tensor]) -> Iterator[list[Swap]]:
    """Within the block, each tensor of a module is what `substitute_for` returns for it. Tied tensors stay tied.

    These are the parameters, the buffers, and attributes that are plain tensors, such as GPT-J's table of positions.
    """
    made: dict[int, Tensor] = {}
    swaps = []
    for module in model.modules():
        for holder in (module._parameters, module._buffers, vars(module)):
            for name, own in holder.items():
                if isinstance(own, Tensor):
                    if id(own) not in made:
                        made[id(own)] = substitute_for(own)
                    swaps.append(Swap(holder, name, own, made[id(own)]))
    try:
        for swap in swaps:
            swap.holder[swap.name] = swap.substitute
        yield swaps
    finally:
        for swap in swaps:
            swap.holder[swap.name] = swap.own


class _Copied(NamedTuple):
    """A copy on the device, and the parameter that is made of it."""

    placed: Tensor
    parameter: nn.Parameter


class DeviceWeights:
    """The device copies of a model's weights. A parameter is copied again only after its bytes have changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters: dict[int, _Copied] = {}
        self._known: dict[int, _Copied] = {}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block, the weights of a CPU model are on the device.

        A buffer that the model writes to, or replaces, is copied back at the end.
        """
        self._known, self._parameters = self._parameters, {}
        with substituted(self._model, self._on_device) as swaps:
            self._known = {}  # frees the copies of parameters that the model no longer has
            copies = [swap for swap in swaps if swap.substitute is not swap.own and not _is_parameter(swap)]
            versions = [swap.substitute._version for swap in copies]
            try:
                yield
            finally:
                for swap, version in zip(copies, versions, strict=True):
                    _write_back(swap, version)

    def _on_device(self, own: Tensor) -> Tensor:
        if own.device.type != "cpu":
            return own
        if not isinstance(own, nn.Parameter):
            return own.detach().to(xla.device())
        placed = SESSION.runtime.placement.place(own)
        known = self._known.get(id(own))
        if known is None or known.placed is not placed:
            known = _Copied(placed, nn.Parameter(placed, requires_grad=False))
        self._parameters[id(own)] = known
        return known.parameter


def _is_parameter(swap: Swap) -> bool:
    return isinstance(swap.own, nn.Parameter)


def _write_back(swap: Swap, version: int) -> None:
    now = swap.holder.get(swap.name)
    if now is not swap.substitute:  # the model replaced it
        swap.own = now.cpu() if isinstance(now, Tensor) else now
    elif now._version != version:
        swap.own.copy_(now)
