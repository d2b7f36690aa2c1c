"""Keep Dynamo out of the GRU that torch_xla 2.9 puts in the place of `torch.nn.GRU` when it is imported.

It runs a loop of torch_xla's own, which compiles its body by itself and takes XLA tensors alone. Compiled piece by
piece by Dynamo it ends the process. So Dynamo breaks the graph there, and tensors on the CPU get torch's GRU.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def install() -> None:
    """Override its `forward`, once; torch_xla must have been imported."""
    from torch_xla.experimental.gru import GRU

    plain = GRU.__mro__[1].forward
    loop = torch._dynamo.disable(GRU.forward, reason="torch_xla compiles the loop of its GRU by itself")

    @functools.wraps(plain)
    def forward(self: Any, input: Any, hx: Any = None) -> Any:
        data = input if isinstance(input, torch.Tensor) else input.data
        return (loop if data.device.type == "xla" else plain)(self, input, hx)

    GRU.forward = forward
