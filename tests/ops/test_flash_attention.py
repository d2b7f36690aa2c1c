"""`kp::flash_attention` and its gradients where there is no TPU: the arithmetic of `kp::attention`, on every device.

N, S, T, D: batch x heads, queries, keys, width of a head.
"""

import pytest
import torch
import torch.nn.functional as F
import torch_xla
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import kp_dynamo
import kp_dynamo.ops  # registers the operators
from kp_dynamo.ops.flash_kernels import FlashScoring, calling_flash

kp = torch.ops.kp
BF16, F32 = torch.bfloat16, torch.float32
N, S, T, D = 2, 128, 256, 16
SCORING = (0.25, True, 128)
PLAIN = ([], [], [], 0.25, True, False, 128)


def operands(dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((N, S, D), (N, D, T), (N, T, D), (N, S, D))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def flash(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    saved = kp.flash_attention_train(q, k, v, *SCORING)
    gradients = kp.flash_attention_backward(grad, q, k, v, *saved, *SCORING, 0.5, 0.25)
    return [kp.flash_attention(q, k, v, *SCORING), *saved, *gradients]


def plain(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    saved = kp.attention_train(q, k, v, *PLAIN)
    gradients = kp.attention_backward(grad, q, k, v, *saved, *PLAIN, 0.5, 0.25)
    return [kp.attention(q, k, v, *PLAIN), *saved, *gradients]


@pytest.mark.quick("dtype0-cpu", "dtype1-xla")
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_forward_and_gradients_are_those_of_attention(dtype, device):
    given = [t.to(torch_xla.device() if device == "xla" else "cpu") for t in operands(dtype)]
    with torch._C._AutoDispatchBelowAutograd():
        found, expected = flash(*given), plain(*given)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.device.type == device
        assert torch.equal(mine.cpu(), theirs.cpu())  # the same operations


def test_fake_results_are_like_real_ones():
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = flash(*(mode.from_tensor(t) for t in operands(BF16)))
    for fake, real in zip(fakes, flash(*operands(BF16)), strict=True):
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


def test_flops_are_those_of_attention():
    with FlopCounterMode(display=False) as mine:
        flash(*operands(F32))
    with FlopCounterMode(display=False) as theirs:
        plain(*operands(F32))
    # the forward twice, and four products behind it
    assert mine.get_total_flops() == theirs.get_total_flops() == 2 * N * S * T * D * (2 + 2 + 4)


class Ones:
    """In the place of a TPU's kernels."""

    def takes(self, num_heads: int) -> bool:
        return True

    def attention(self, q: Tensor, k: Tensor, v: Tensor, scoring: FlashScoring) -> Tensor:
        assert scoring == FlashScoring(*SCORING)
        return torch.ones_like(q)


def test_a_platform_with_kernels_calls_them_on_xla_alone():
    q, k, v, _ = operands(F32)
    device = torch_xla.device()
    with torch._C._AutoDispatchBelowAutograd(), calling_flash(Ones()):
        on_xla = kp.flash_attention(q.to(device), k.to(device), v.to(device), *SCORING)
        on_cpu = kp.flash_attention(q, k, v, *SCORING)
    assert torch.equal(on_xla.cpu(), torch.ones(N, S, D))
    assert torch.equal(on_cpu, kp.attention(q, k, v, *PLAIN))


class OfEachHead:
    """Like a TPU's kernels: as many keys and values as queries."""

    def takes(self, num_heads: int) -> bool:
        return True

    def attention(self, q: Tensor, k: Tensor, v: Tensor, _: FlashScoring) -> Tensor:
        return self.attention_train(q, k, v, _)[0]

    def attention_train(self, q: Tensor, k: Tensor, v: Tensor, _: FlashScoring) -> tuple[Tensor, Tensor]:
        assert q.shape[0] == k.shape[0] == v.shape[0]
        return kp.attention_train(q, k, v, *PLAIN)

    def attention_backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], _: FlashScoring, factors: tuple[float, float]
    ) -> tuple[Tensor, ...]:
        return kp.attention_backward(grad, *saved, *PLAIN, *factors)


def test_shared_heads_are_repeated_for_the_kernels_alone():
    q, k, v, grad = operands(F32)
    device = torch_xla.device()
    given = [t.to(device) for t in (q, k[:1], v[:1], grad)]
    with torch._C._AutoDispatchBelowAutograd(), calling_flash(OfEachHead()):
        found = flash(*given)
    for mine, expected in zip(found, plain(q, k[:1], v[:1], grad), strict=True):
        # float32 sums of 256 products in another order
        torch.testing.assert_close(mine.cpu(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.quick("float32")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_compiled_model_computes_what_it_computes_without_the_pass(precision):
    torch.manual_seed(0)
    qkv = [torch.randn(1, 2, 256, 32) for _ in range(3)]

    def results(*passes: object) -> list[Tensor]:
        options = {"precision": precision, "extra_passes": list(passes), "strict": True}
        attend = torch.compile(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), backend="kp_tpu", options=options
        )
        given = [t.clone().requires_grad_() for t in qkv]
        attend(*given).square().sum().backward()
        with torch.no_grad():
            return [attend(*qkv), *(t.grad for t in given)]

    # blocks of 128 and not one of 512: sums of 256 in another order, weights and gradients rounded to bfloat16
    eps = torch.finfo(F32 if precision == "float32" else BF16).eps
    for mine, theirs in zip(results(kp_dynamo.FlashAttention(128)), results(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=16 * eps, atol=16 * eps)
