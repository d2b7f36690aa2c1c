"""Call a TPU's flash attention kernels in a trace: `tpu_custom_call`s with their pre- and postprocessing.

Shapes: N batch x heads, S queries, T keys, D width of a head. The kernels take [B, H, S, D]: here B is 1 and H is N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kp_dynamo.compat import xla
from kp_dynamo.exceptions import XLACompilationError
from kp_dynamo.lowering.flash_payloads import payload_of
from kp_dynamo.lowering.kernel_parts import DeviceParts
from kp_dynamo.ops.flash_kernels import FlashKernel, FlashScoring, Part

_LANES = 128
"""The kernels broadcast a value per row to 128 lanes, as in vector registers."""


class CustomCalls:
    """The kernels as custom calls on XLA tensors.

    Args:
        parts: Among how many chips the N of a call are divided. The kernel is that of one chip; the call has the shapes
            of all, until the compiler's process divides it.
        divided: How the devices of this process divide the N of a call; None for one device, and ahead of time.
    """

    def __init__(self, parts: int = 1, divided: DeviceParts | None = None) -> None:
        self._parts = parts if divided is None else divided.mesh.num_devices
        self._divided = divided

    def takes(self, num_heads: int) -> bool:
        """Whether this N divides among the devices of this process, as that of an uneven batch may not."""
        return self._divided is None or self._divided.takes(num_heads)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, scoring: FlashScoring) -> Tensor:
        kernel = self._kernel("forward", q, v, scoring)
        (result,) = self._call(kernel, (q, k.transpose(1, 2), v), [q])
        return result

    def attention_train(self, q: Tensor, k: Tensor, v: Tensor, scoring: FlashScoring) -> tuple[Tensor, Tensor]:
        kernel = self._kernel("train", q, v, scoring)
        row = _wide(q.select(2, 0).to(torch.float32), _LANES)
        result, sums, largest = self._call(kernel, (q, k.transpose(1, 2), v), [q, row, row])
        return result, torch.stack([largest.select(2, 0), sums.select(2, 0)])

    def attention_backward(
        self, grad: Tensor, saved: Sequence[Tensor], scoring: FlashScoring, factors: tuple[float, float]
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, result, statistics = saved
        k = k.transpose(1, 2)
        delta = (grad.to(torch.float32) * result.to(torch.float32)).sum(-1)
        largest, sums = (_wide(x, _LANES) for x in statistics.unbind(0))
        # For "queries", JAX passes the last operand with the width of a block, but the kernel reads windows of 128.
        operands = (q, k, v, sums, largest, grad, _wide(delta, _LANES))
        d_k, d_v = self._call(self._kernel("keys", q, v, scoring), operands, [k, v])
        (d_q,) = self._call(self._kernel("queries", q, v, scoring), operands, [q])
        # The kernels multiply both by the scale of the scores.
        q_factor, k_factor = (factor / scoring.scale for factor in factors)
        return _scaled(d_q, q_factor), _scaled(d_k, k_factor).transpose(1, 2), d_v

    def _kernel(self, part: Part, q: Tensor, v: Tensor, scoring: FlashScoring) -> FlashKernel:
        asked = xla.xlac()._xla_get_mat_mul_precision()
        # Products of bfloat16 operands are exact anyway. The kernels have no "high" precision with three passes.
        exact = q.dtype == torch.float32 and asked != "default"
        num_heads, num_queries, width = q.shape
        if num_heads % self._parts:
            raise XLACompilationError(
                f"a flash attention kernel of {num_heads} heads (batch x heads) does not divide among {self._parts} "
                "chips. Try: another batch, or leave FlashAttention() out of extra_passes."
            )
        precision: Literal["default", "highest"] = "highest" if exact else "default"
        return FlashKernel(part, num_heads // self._parts, num_queries, v.shape[1], width, q.dtype, scoring, precision)

    def _call(self, kernel: FlashKernel, operands: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """Call a kernel; its results have the shapes and dtypes of `like`."""
        given, parts = [x.unsqueeze(0) for x in operands], self._divided
        if parts is None:
            found = call_kernel(kernel, given, [[1, *x.shape] for x in like], [x.dtype for x in like])
        else:
            shapes = [[1, kernel.num_heads, *x.shape[1:]] for x in like]
            own = call_kernel(kernel, [parts.of(x) for x in given], shapes, [x.dtype for x in like])
            found = [parts.joined(x) for x in own]
        return [x.squeeze(0) for x in found]


def call_kernel(
    kernel: FlashKernel, operands: Sequence[Tensor], shapes: Sequence[list[int]], dtypes: Sequence[torch.dtype]
) -> list[Tensor]:
    """The results of a kernel, of these shapes and dtypes. Operands and results are [1, N, ...]."""
    # torch_xla 2.9: its public `make_kernel_from_pallas` makes JAX run on the device of the tensors.
    found: list[Tensor] = xla.xlac()._xla_tpu_custom_call([*operands], payload_of(kernel), [*shapes], [*dtypes])
    return found


def _wide(rows: Tensor, width: int) -> Tensor:
    """[N, S] -> [N, S, width]."""
    return rows.unsqueeze(-1).expand(*rows.shape, width)


def _scaled(gradient: Tensor, factor: float) -> Tensor:
    return gradient if factor == 1 else (gradient.to(torch.float32) * factor).to(gradient.dtype)
