"""Autocast on XLA tensors casts the operands of attention, as on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import kp_dynamo
from kp_dynamo.compat import xla


@pytest.fixture(scope="module", autouse=True)
def _device():
    return xla.device()


def attend(
    device: str, dtypes: tuple[torch.dtype, ...], backend: str | None = None, **settings: object
) -> torch.Tensor:
    torch.manual_seed(0)
    operands = [torch.randn(2, 4, 6, 8).to(dtype).to(device) for dtype in dtypes]
    settings = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in settings.items()}

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=q.dtype != DOUBLE):
            return F.scaled_dot_product_attention(q, k, v, **settings)

    return (run if backend is None else torch.compile(run, backend=backend, fullgraph=True))(*operands).cpu()


WIDE, NARROW, DOUBLE = torch.float32, torch.bfloat16, torch.float64
MASK = torch.zeros(6, 6).masked_fill(torch.ones(6, 6).tril(-2).bool(), torch.finfo(torch.float32).min)


@pytest.mark.parametrize("backend", [None, "kp_tpu"])
@pytest.mark.parametrize("settings", [{}, {"is_causal": True}, {"attn_mask": MASK}, {"scale": 0.5}])
@pytest.mark.parametrize("dtypes", [(WIDE, WIDE, NARROW), (WIDE, WIDE, WIDE)])
def test_operands_are_narrow(dtypes, settings, backend):
    found, wanted = (attend(device, dtypes, b, **settings) for device, b in (("xla", backend), ("cpu", None)))
    assert found.dtype == wanted.dtype == NARROW
    exact = attend("cpu", (DOUBLE,) * 3, **{n: v.double() if n == "attn_mask" else v for n, v in settings.items()})
    rounding = (wanted.double() - exact).norm()
    assert (found.double() - exact).norm() <= 1.5 * rounding


def test_float64_is_not_cast():
    x = torch.randn(1, 2, 4, 8, dtype=DOUBLE, device="xla")
    with torch.autocast("xla", torch.bfloat16):
        assert F.scaled_dot_product_attention(x, x, x).dtype == DOUBLE


def test_gradients_have_the_dtypes_of_the_operands():
    q, k, v = (torch.randn(1, 2, 4, 8, device="xla").to(dtype).requires_grad_() for dtype in (WIDE, WIDE, NARROW))
    with torch.autocast("xla", torch.bfloat16):
        result = torch.compile(F.scaled_dot_product_attention, backend=kp_dynamo.kp_tpu)(q, k, v)
    result.float().sum().backward()
    assert [x.grad.dtype for x in (q, k, v)] == [WIDE, WIDE, NARROW]
