"""Flash attention for a TPU from a process without one: what is handed over, what its compiler says of it."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kp_dynamo
from kp_dynamo.aot.report import AotReport
from kp_dynamo.exceptions import TPUNotAvailableError, XLACompilationError
from kp_dynamo.hardware import CHIPS
from kp_dynamo.lowering import flash_payloads
from kp_dynamo.ops.flash_kernels import FlashKernel, FlashScoring

H, S, D = 2, 256, 64


class Attention(nn.Module):
    """Projections around a causal attention, [B, S, H * D]."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(H * D, 3 * H * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(-1, S, 3, H, D).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


OPTIONS = {"extra_passes": [kp_dynamo.FlashAttention()], "strict": True}


@functools.cache
def report(train: bool) -> AotReport:
    return kp_dynamo.aot_compile(Attention(), (torch.ones(1, S, H * D),), train=train, options=OPTIONS)


@pytest.mark.parametrize(("train", "num_calls"), [(False, [1]), (True, [1, 2])])
def test_the_programs_hold_the_kernels(train, num_calls):
    found = report(train)
    assert [len(p.custom_calls) for p in found.programs] == num_calls
    calls = [call for p in found.programs for call in p.custom_calls]
    assert all("tpu_custom_call" in call.name for call in calls)
    assert {call.origins[0].op for call in calls} == (
        {"kp.flash_attention_train.default", "kp.flash_attention_backward.default"}
        if train
        else {"kp.flash_attention.default"}
    )


def test_a_call_has_its_roofline_in_the_report_and_is_never_zero():
    found = report(True)
    products = 2 * H * S * S * D
    calls = [call for p in found.programs for call in p.custom_calls]
    assert sorted(call.flops for call in calls) == [2 * products, 3 * products, 4 * products]
    for call in calls:
        by_flops, by_bytes = call.flops / CHIPS["v5e"].bf16_flops, call.hbm_bytes / CHIPS["v5e"].hbm_bytes_per_s
        assert call.roofline_ms >= 1e3 * max(by_flops, by_bytes) > 0
    assert 0 < found.custom_call_ms == pytest.approx(sum(call.roofline_ms for call in calls))
    assert found.custom_call_ms < found.modelled_ms
    assert len(found.unknown) == 3
    assert f"custom calls    {found.custom_call_ms * 1e3:.3f} us of the modelled time, by their rooflines" in str(found)


@pytest.mark.parametrize(
    ("train", "mesh", "sharding"),
    [
        (False, {"data": 4}, "data"),
        pytest.param(True, {"data": 4}, "data", marks=pytest.mark.slow),
        pytest.param(True, {"data": 2, "model": 2}, {"project": "colwise"}, marks=pytest.mark.slow),
    ],
)
def test_each_chip_of_several_computes_its_own_sequences_and_heads(train, mesh, sharding):
    compile_ = functools.partial(kp_dynamo.aot_compile, Attention(), train=train, options=OPTIONS)
    one = compile_((torch.ones(1, S, H * D),))
    four = compile_((torch.ones(4, S, H * D),), chips=4, mesh=mesh, sharding=sharding)
    assert four.custom_call_ms == pytest.approx(one.custom_call_ms)
    for alone, divided in zip(one.programs, four.programs, strict=True):
        of_one, of_four = (sorted((c.flops, c.hbm_bytes) for c in p.custom_calls) for p in (alone, divided))
        assert of_four == of_one
    if sharding == "data":
        assert {row.kind for row in four.collectives} <= {"all-reduce"}  # of the gradients


def test_xla_cpu_in_the_same_process_is_right():
    report(True)
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(1, S, H * D)
    run = torch.compile(model, backend="kp_tpu", options={**OPTIONS, "precision": "float32"})
    found, expected = run(x), model(x)
    # float32 sums of 256 in another order, softmax between
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(y.square().sum(), model.parameters()) for y in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-3)


def kernel(part: str = "train", width: int = D, precision: str = "default") -> FlashKernel:
    return FlashKernel(part, 1, 128, 256, width, torch.float32, FlashScoring(0.3, True, 128), precision)


def test_lowering_starts_no_tpu_client():
    import jax

    flash_payloads.payload_of(kernel())
    assert {device.platform for device in jax.devices()} == {"cpu"}


@pytest.mark.slow
def test_lowering_leaves_the_environment_of_torch_xla():
    """In a process that has not imported JAX."""
    code = """
import os

import torch

from kp_dynamo.lowering.flash_payloads import payload_of
from kp_dynamo.ops.flash_kernels import FlashKernel, FlashScoring

payload_of(FlashKernel("train", 1, 128, 256, 128, torch.float32, FlashScoring(0.3, True, 128), "default"))
assert "TPU_SKIP_MDS_QUERY" not in os.environ
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_payload_is_made_once_and_differs_with_the_precision():
    assert flash_payloads.payload_of(kernel()) is flash_payloads.payload_of(kernel())
    bodies = {json.loads(flash_payloads.payload_of(kernel(precision=p)))["custom_call_config"]["body"]
              for p in ("default", "highest")}  # fmt: skip
    assert len(bodies) == 2


def test_what_a_kernel_does_not_take_is_an_error_that_names_it():
    with pytest.raises(XLACompilationError, match=r"cannot lower .*width=192.*remove FlashAttention"):
        flash_payloads.payload_of(kernel(width=192))


def test_without_jax_the_extra_is_named_and_nothing_runs_on_the_cpu_instead(monkeypatch):
    flash_payloads.payload_of.cache_clear()
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.ops.tpu", None)
    with pytest.raises(TPUNotAvailableError, match=r'pip install "kp_dynamo\[tpu\]"'):
        kp_dynamo.aot_compile(Attention(), (torch.ones(1, S, H * D),), options={**OPTIONS, "strict": False})


@pytest.mark.slow
def test_the_kernels_compute_what_the_operators_do():
    """In Pallas' own interpreter of a TPU, with fewer queries than keys; statistics are the two numbers of a row."""
    import jax
    from jax.experimental.pallas import tpu
    from jax.experimental.pallas.ops.tpu import flash_attention

    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(s, generator=generator) for s in ((1, 128, D), (1, 256, D), (1, 256, D), (1, 128, D)))
    kp, scoring = torch.ops.kp, (0.3, True, 128)
    result, statistics = kp.flash_attention_train(q, k.mT, v, *scoring)
    d_q, d_k, d_v = kp.flash_attention_backward(grad, q, k.mT, v, result, statistics, *scoring, 0.3, 0.3)

    def run(part: str, *arguments: Tensor) -> list[Tensor]:
        call, _ = flash_payloads._call_of(jax, flash_attention, kernel(part))
        with tpu.force_tpu_interpret_mode(), jax.default_matmul_precision("highest"):
            found = call(*(jax.numpy.asarray(t.numpy())[None] for t in arguments))
        return [torch.tensor(jax.device_get(x))[0] for x in found if x is not None]

    saved = (q, k, v, statistics[1], statistics[0], grad, (grad * result).sum(-1))
    found = [*run("train", q, k, v), *run("keys", *saved), *run("queries", *saved)]
    expected = [result, statistics[1], statistics[0], d_k.mT, d_v, d_q]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)  # sums of 256 in another order
