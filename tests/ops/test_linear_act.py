"""`kp::linear_act`: its kernels, its derivative, what it refuses, and what its one rounding is worth.

M, K, N are the sizes of input [M, K] and weight [K, N].
"""

import pytest
import torch
import torch_xla
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from kp_dynamo.ops import ACTIVATIONS

linear_act = torch.ops.kp.linear_act.default
linear_act_train = torch.ops.kp.linear_act_train.default
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def operands(m: int = 6, k: int = 4, n: int = 8, dtype: torch.dtype = F32) -> tuple[Tensor, ...]:
    """Input, weight, bias, multiplier; the pre-activation has about unit variance."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((m, k), (k, n), (n,), (m, n))
    x, w, b, u = (torch.randn(shape, generator=generator) for shape in shapes)
    return x.to(dtype), (w / k**0.5).to(dtype), (b / 4).to(dtype), u.to(dtype)


def exact(activation: str, x: Tensor, w: Tensor, b: Tensor, u: Tensor | None = None) -> Tensor:
    result = ACTIVATIONS[activation].forward(x.double() @ w.double() + b.double())
    return result if u is None else result * u.double()


def relative_error(result: Tensor, reference: Tensor) -> float:
    return float((result.double().cpu() - reference).norm() / reference.norm())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [F32, BF16, F64, torch.float16])
def test_result_is_the_exact_value_rounded_once(activation, dtype):
    x, w, b, u = operands(dtype=dtype)
    reference = exact(activation, x, w, b, u)
    result = linear_act(x, w, b, activation, multiplier=u)
    # one rounding errs by half a unit in the last place; twice that, plus float32's own, is room for a tie
    torch.testing.assert_close(result, reference.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert result.dtype == dtype


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_xla_agrees_with_the_cpu(activation, dtype):
    arguments = operands(dtype=dtype)
    x, w, b, u = (t.to(torch_xla.device()) for t in arguments)
    results = linear_act_train(x, w, b, activation, multiplier=u)
    x, w, b, u = arguments
    assert results[0].device.type == "xla"
    for result, expected in zip(results, linear_act_train(x, w, b, activation, multiplier=u), strict=True):
        # float32 sums and transcendental functions differ by a few units; bfloat16 then rounds them to the same value
        # or, next to a tie, to its neighbour
        torch.testing.assert_close(result.cpu(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_xla_upcasts_the_operands_before_the_matmul():
    x, w, b, _ = (t.to(torch_xla.device()) for t in operands(dtype=BF16))
    program = torch_xla._XLAC._get_xla_tensors_hlo([linear_act(x, w, b, "gelu")])
    product = next(line for line in program.splitlines() if " dot(" in line)
    assert product.split(" = ")[1].startswith("f32[6,8]")


def test_pre_activation_comes_in_the_dtype_of_the_input():
    x, w, b, _ = operands(dtype=BF16)
    result, pre = linear_act_train(x, w, b, "silu", out_dtype=F32)
    assert (result.dtype, pre.dtype) == (F32, BF16)
    torch.testing.assert_close(pre, (x.float() @ w.float() + b.float()).to(BF16), rtol=0, atol=0)


def test_out_dtype_keeps_what_a_rounding_would_lose():
    x, w, b, _ = operands(dtype=BF16)
    result = linear_act(x, w, b, "gelu", out_dtype=F32)
    torch.testing.assert_close(result, exact("gelu", x, w, b).float(), rtol=1e-5, atol=1e-6)
    assert not torch.equal(result, result.to(BF16).float())


def test_bias_and_gate_may_be_wider_than_the_matmul():
    x, w, b, u = operands(dtype=BF16)
    bias, gate = b.float() + 1e-4, u.float() + 1e-4
    result = linear_act(x, w, bias, "gelu", multiplier=gate, out_dtype=F32)
    torch.testing.assert_close(result, exact("gelu", x, w, bias, gate).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.quick(
    "False-dtype1-linear_act.default", "True-dtype0-linear_act.default", "True-dtype1-linear_act_train.default",
)  # fmt: skip
@pytest.mark.parametrize("op", [linear_act, linear_act_train])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("has_gradient", [False, True])
def test_opcheck(op, dtype, has_gradient):
    x, w, b, u = (t.requires_grad_(has_gradient) for t in operands(dtype=dtype))
    torch.library.opcheck(op, (x, w, b, "silu", u))
    torch.library.opcheck(op, (x, w, None, "gelu"), {"out_dtype": F32})


@pytest.mark.quick(
    "relu-linear_act.default", "gelu-linear_act_train.default", "gelu_tanh-linear_act.default",
    "silu-linear_act_train.default", "tanh-linear_act.default", "sigmoid-linear_act.default",
)  # fmt: skip
@pytest.mark.parametrize("op", [linear_act, linear_act_train])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivatives(op, activation):
    arguments = tuple(t.requires_grad_() for t in operands(3, 4, 5, F64))

    def run(x, w, b, u):
        return op(x, w, b, activation, u)

    assert torch.autograd.gradcheck(run, arguments)
    assert torch.autograd.gradgradcheck(run, arguments)


def test_fake_keeps_symbolic_sizes():
    def run(x, w):
        return linear_act_train(x, w, None, "relu", out_dtype=BF16)

    gm = make_fx(run, tracing_mode="symbolic")(torch.randn(6, 4), torch.randn(4, 8))
    x, _, both, *_ = (node.meta["val"] for node in gm.graph.nodes if node.op != "output")
    assert isinstance(both[0].shape[0], torch.SymInt)
    assert both[0].shape[0] == x.shape[0]
    assert [result.dtype for result in both] == [BF16, F32]


@pytest.mark.parametrize("shape", [(0, 4, 8), (6, 0, 8), (6, 4, 0)])
def test_empty_sizes(shape):
    x, w, b, u = (
        operands(*shape) if shape[1] else (torch.zeros(6, 0), torch.zeros(0, 8), torch.ones(8), torch.ones(6, 8))
    )
    result = linear_act(x, w, b, "relu", multiplier=u)
    torch.testing.assert_close(result, torch.relu(x @ w + b) * u)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"activation": "mish"}, ValueError, "activation='mish' is invalid. Allowed: relu, gelu"),
        ({"input": torch.zeros(6, 4, dtype=BF16)}, TypeError, "must have the same floating-point dtype"),
        ({"input": torch.zeros(6, 4).int(), "weight": torch.zeros(4, 8).int()}, TypeError, "floating-point dtype"),
        ({"input": torch.zeros(2, 3, 4)}, RuntimeError, r"input is \(2, 3, 4\), it must be"),
        ({"weight": torch.zeros(5, 8)}, RuntimeError, r"weight is \(5, 8\), it must be \(4, 8\)"),
        ({"bias": torch.zeros(1)}, RuntimeError, r"bias is \(1,\), it must be \(8,\)"),
        ({"multiplier": torch.zeros(1, 8)}, RuntimeError, r"multiplier is \(1, 8\), it must be \(6, 8\)"),
        ({"bias": torch.zeros(8).double()}, TypeError, "bias torch.float64 does not fit into torch.float32"),
    ],
)
def test_refuses(change, error, message):
    x, w, b, u = operands()
    arguments = {"input": x, "weight": w, "bias": b, "activation": "relu", "multiplier": u} | change
    with pytest.raises(error, match=message):
        linear_act(**arguments)


# What one rounding is worth. bfloat16 chain: y = act(p (1 + d1)) (1 + d2), the d independent, of one variance r^2.
# With c = |p act'(p)| / |act(p)|, norms over the tensor, its error is r sqrt(1 + n c^2), n the number of roundings
# before the activation: 1 for eager CPU's addmm, which adds the bias before it rounds, 2 on XLA, which rounds the
# product too. One rounding at the end errs by r: the ratio is 1 / sqrt(1 + n c^2). p ~ N(0, 1) gives c = 1.2 for
# GELU and SiLU, so 0.64 (n = 1) and 0.51 (n = 2); XLA also rounds inside the activation.
SIZE = (256, 256, 512)


def condition(activation: str, p: Tensor) -> float:
    p = p.detach().requires_grad_()
    value = ACTIVATIONS[activation].forward(p)
    (slope,) = torch.autograd.grad(value.sum(), p)
    return float((p * slope).detach().norm() / value.detach().norm())


@pytest.mark.parametrize("activation", sorted(set(ACTIVATIONS) - {"relu"}))  # a rounded relu rounds no more: no gain
def test_error_against_the_eager_chain_is_as_derived(activation):
    x, w, b, _ = operands(*SIZE, BF16)
    reference = exact(activation, x, w, b)
    fused = relative_error(linear_act(x, w, b, activation), reference)
    chain = relative_error(ACTIVATIONS[activation].forward(torch.addmm(b, x, w)), reference)
    derived = (1 + condition(activation, x.double() @ w.double() + b.double()) ** 2) ** -0.5
    # the d are not of quite one variance: it depends on where in its binade a value lies (Tanh and Sigmoid crowd it)
    assert fused / chain <= 1.1 * derived
    assert fused == pytest.approx(relative_error(reference.to(BF16), reference), rel=1e-3)


@pytest.mark.quick("gelu", "relu")
@pytest.mark.parametrize(
    ("activation", "at_most"), [("gelu", 0.55), ("gelu_tanh", 0.55), ("silu", 0.55), ("relu", 0.75)]
)
def test_error_against_the_chain_on_xla(activation, at_most):
    x, w, b, _ = operands(*SIZE, BF16)
    reference = exact(activation, x, w, b)
    x, w, b = (t.to(torch_xla.device()) for t in (x, w, b))
    fused = relative_error(linear_act(x, w, b, activation), reference)
    of_aten = ACTIVATIONS[activation]
    chain = relative_error(of_aten.op(torch.addmm(b, x, w), **of_aten.options), reference)
    # with n = 2 above: 0.51; ReLU has c = 1, and its own rounding is none: 1 / sqrt(2)
    assert fused / chain <= at_most
