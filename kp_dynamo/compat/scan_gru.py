"""Keep Dynamo out of torch_xla 2.9's GRU, which replaces `torch.nn.GRU` when torch_xla is imported.

It runs torch_xla's own loop, which compiles its body itself and only takes XLA tensors. If Dynamo compiles it piece by
piece, the process aborts. So Dynamo traces torch's GRU, and CPU tensors use it too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def install() -> None:
    """Override its `forward`, once. Import torch_xla first."""
    from torch_xla.experimental.gru import GRU

    plain = GRU.__mro__[1].forward
    loop = torch._dynamo.disable(GRU.forward, reason="torch_xla compiles the loop of its GRU by itself")

    @functools.wraps(plain)
    def forward(self: Any, input: Any, hx: Any = None) -> Any:
        data = input if isinstance(input, torch.Tensor) else input.data
        is_eager = data.device.type == "xla" and not torch.compiler.is_compiling()
        return (loop if is_eager else plain)(self, input, hx)

    GRU.forward = forward
