"""Operators that torch_xla lowers to something else, in the forms that they have here."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.spine import check_gradients_like_eager, check_like_eager, compiled, counted, run_script

NAN = float("nan")
ROWS = torch.tensor([[1.0, NAN, 2.0, NAN], [0.0, 3.0, 3.0, 1.0]])


@pytest.mark.quick("dtype0", "dtype3")
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_a_right_shift_rounds_down(dtype):
    x = torch.tensor([-5, 5, -1, 0, -128, 127], dtype=dtype)
    check_like_eager(lambda x: (x >> 1, x >> 3, x.bitwise_right_shift(7)), x)


def test_a_right_shift_of_large_integers_is_exact():
    check_like_eager(lambda x: (x >> 1, x >> 40), torch.tensor([2**62 + 12345, -(2**62) - 777, -(2**63)]))


def test_extremes_carry_a_nan_on():
    check_like_eager(lambda x: (x.max(), x.amin((0, 1)), torch.maximum(x, x.flip(1)), x.amax(0)), ROWS)


def test_places_of_extremes_are_those_of_the_first_nan():
    check_like_eager(lambda x: (x.argmax(), x.argmax(1), x.argmin(-1, keepdim=True), x.argmax(keepdim=True)), ROWS)
    check_like_eager(lambda x: (*x.max(1), *x.min(0, keepdim=True)), ROWS)


def test_max_pooling_carries_a_nan_on():
    check_like_eager(lambda x: F.max_pool1d(x[None], 2), ROWS)


@pytest.mark.slow  # two processes; the next test starts one as users do
def test_the_users_choice_of_fast_extremes_stays():
    source = """
import os, torch
torch.compile(lambda x: x.max(), backend="kp_tpu")(torch.ones(2))
print(os.environ["XLA_FLAGS"])
"""
    assert "--xla_cpu_enable_fast_min_max=false" in run_script(source, {"XLA_FLAGS": ""}).split()
    chosen = "--xla_cpu_enable_fast_min_max=true"
    flags = run_script(source, {"XLA_FLAGS": chosen}).split()
    assert [flag for flag in flags if "min_max" in flag] == [chosen]
    assert "--xla_cpu_enable_fast_min_max=false" in os.environ["XLA_FLAGS"]


EXTREMES_OF_NAN = """
{before}
x = torch.tensor([[1.0, float("nan"), 3.0, 0.0]]).to("xla")
f = torch.compile(lambda x: (torch.nn.functional.max_pool1d(x, 2), x.max(1).values), backend="kp_tpu")
for _ in range(2):
    print([y.isnan().any().item() for y in f(x)])
torch.compile(torch.sin, backend="kp_tpu")(x)
"""


@pytest.mark.parametrize(
    "before",
    [
        "import kp_dynamo, torch, torch_xla",
        pytest.param("import torch, torch_xla, kp_dynamo", marks=pytest.mark.slow),
    ],
)
def test_importing_kp_dynamo_keeps_nan_on_a_client_that_the_user_starts(before):
    # Without PJRT_DEVICE too: torch_xla then takes the CPU.
    source = f"import os; del os.environ['PJRT_DEVICE']; {before}"
    printed = run_script(EXTREMES_OF_NAN.format(before=source), {"XLA_FLAGS": ""})
    assert printed == "[True, True]\n[True, True]\n"


@pytest.mark.slow
def test_a_client_that_started_without_the_flag_is_a_warning_once():
    before = "import sys; sys.stderr = sys.stdout; import torch, torch_xla; torch.ones(1, device='xla')"
    printed = run_script(EXTREMES_OF_NAN.format(before=before), {"XLA_FLAGS": ""})
    assert printed.count("drop a NaN that eager keeps. Try: import kp_dynamo before the first use") == 1
    chosen = {"XLA_FLAGS": "--xla_cpu_enable_fast_min_max=true"}
    assert "drop a NaN" not in run_script(EXTREMES_OF_NAN.format(before=before), chosen)


def test_logit_clamps():
    check_like_eager(lambda x: torch.logit(x, eps=1e-6), torch.tensor([-0.5, 0.0, 0.3, 1.0, 1.5]))


@pytest.mark.parametrize(
    "fn",
    [torch.log2, torch.log10, F.gelu, lambda x: F.gelu(x, approximate="tanh"), lambda x: F.threshold(x, 0.1, 20.1)],
)
def test_float64_is_float64(fn):
    x = torch.linspace(0.01, 3, 50, dtype=torch.float64)
    torch.testing.assert_close(compiled(lambda x: fn(x))(x), fn(x), rtol=1e-14, atol=1e-15)


@pytest.mark.quick("shape1-how1", "shape3-how3")
@pytest.mark.parametrize(
    ("shape", "how"),
    [
        ((3, 4), {}),
        ((3, 3, 1), {}),
        ((3, 4, 2), {"offset": 1}),
        ((3, 4, 2), {"offset": -1, "dim1": 2, "dim2": 0}),
        ((2, 3, 4, 5), {"dim1": -3, "dim2": -1}),
    ],
)
def test_diagonals_lie_in_the_last_dimension(shape, how):
    """torch_xla 2.9 says so and puts them first."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    check_like_eager(lambda x: torch.diagonal(x, **how) + 1, x)
    check_gradients_like_eager(lambda x: torch.diagonal(x, **how) * 2, x.requires_grad_())


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_float64_stays_float64_after_a_linear(approximate):
    """Fused into one operator, too, and in its gradient."""
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(8, 8, dtype=torch.float64, generator=generator) for _ in range(3)]

    def fn(x, w, v):
        return F.linear(F.gelu(F.linear(x, w), approximate=approximate), v)

    def both(run):
        leaves = [t.clone().requires_grad_() for t in args]
        result = run(*leaves)
        return result, *torch.autograd.grad(result.sum(), leaves)

    torch.testing.assert_close(both(compiled(fn)), both(fn), rtol=1e-12, atol=1e-13)


@pytest.mark.quick("0.3")
@pytest.mark.parametrize("alpha", [0.3, 1.0, 2.0])
def test_gradients_of_elu_know_alpha(alpha):
    x = torch.tensor([-2.0, -0.5, 0.5, 2.0], requires_grad=True)
    check_gradients_like_eager(lambda x: F.elu(x, alpha), x)
    check_gradients_like_eager(lambda x: F.celu(x, alpha), x)


def test_graphs_that_differ_in_a_constant_share_no_program():
    """torch_xla 2.9's key of a program leaves the constants of some operators out."""
    x = torch.tensor([-2.0, -0.5, 0.5])
    by_slope = [compiled(lambda x, s=slope: torch.ops.aten.softshrink(x, s))(x) for slope in (0.3, 1.0)]
    for slope, result in zip((0.3, 1.0), by_slope, strict=True):
        assert torch.equal(result, F.softshrink(x, slope))


def test_a_result_that_torch_xla_leaves_out_comes_from_the_cpu():
    check_gradients_like_eager(torch.logdet, torch.eye(3).mul(2).requires_grad_())


def test_importing_torch_xla_leaves_torch_as_it_was():
    source = """
import torch
gru = torch.nn.GRU
torch.compile(lambda x: x + 1, backend="kp_tpu")(torch.ones(2))
assert torch.nn.GRU is gru
print(torch.nn.GRU(3, 4)(torch.ones(2, 1, 3))[0].shape)
"""
    assert run_script(source).strip() == "torch.Size([2, 1, 4])"


@pytest.mark.slow
def test_the_gru_of_torch_xla_runs_beside_compiled_code():
    """`import torch_xla` puts it in the place of torch.nn.GRU. Compiled in pieces it ended the process."""
    source = """
import torch, torch_xla
from torch.nn.modules.rnn import GRU
torch.ones(1, device=torch_xla.device())
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GRU(4, 4))
assert type(model[1]) is not GRU
plain = GRU(4, 4)
plain.load_state_dict(model[1].state_dict())
x = torch.randn(5, 2, 3)
expected = plain(model[0](x))[0]
for device in ("cpu", "xla"):
    found = torch.compile(model.to(device), backend="kp_tpu", options={"precision": "float32"})(x.to(device))[0]
    found.sum().backward()
    print((found.cpu() - expected).abs().max().item() < 1e-5)
"""
    assert run_script(source).split() == ["True", "True"]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_dtype_that_torch_xla_lacks_is_refused_by_name():
    with pytest.raises(Exception, match=r"torch.complex32.*Allowed: bool"):
        compiled(lambda x: x * x)(torch.ones(3, dtype=torch.complex32))
    check_like_eager(lambda x: x * x, torch.ones(3))


def test_a_mutating_operator_of_the_users_is_refused_under_its_name():
    @torch.library.custom_op("kp_tests::write_", mutates_args=("x",))
    def write_(x: torch.Tensor) -> None:
        x.add_(1)

    def fn(x):
        y = x * 2
        write_(y)
        return y

    with pytest.raises(Exception, match=r"kp_tests.write_.default, which writes to its arguments"):
        compiled(fn)(torch.ones(3))


def test_threads_may_train_one_model_with_buffers():
    import threading

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    run, x, problems = compiled(model), torch.randn(8, 4), []
    run(x).sum().backward()

    def work():
        try:
            for _ in range(20):
                run(x).sum().backward()
        except RuntimeError as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


@pytest.mark.quick("True-relu")
@pytest.mark.parametrize(
    ("norm_first", "activation"),
    [
        (True, "relu"),
        (False, "gelu"),
        *(pytest.param(*how, marks=pytest.mark.slow) for how in ((True, "gelu"), (False, "relu"))),
    ],
)
def test_an_encoder_layer_in_evaluation_does_not_run_on_the_cpu(norm_first, activation):
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.1, activation, batch_first=True, norm_first=norm_first).eval()
    x, keep = torch.randn(2, 6, 16), torch.arange(6) < torch.tensor([[6], [4]])
    for masks in ({}, {"src_key_padding_mask": ~keep}, {"src_mask": torch.ones(6, 6).triu(1).bool()}):
        with torch.no_grad(), counted() as counts:
            result = compiled(lambda x, m=masks: layer(x, **m))(x)
        assert counts.fallbacks == 0
        torch.testing.assert_close(result, layer(x, **masks).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("average", [True, False])
def test_attention_in_evaluation_gives_its_weights(average):
    layer, x = nn.MultiheadAttention(16, 4, batch_first=True).eval(), torch.randn(2, 6, 16)
    with torch.no_grad(), counted() as counts:
        found = compiled(lambda x: layer(x, x, x, average_attn_weights=average))(x)
        expected = layer(x, x, x, average_attn_weights=average)
    assert counts.fallbacks == 0
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.quick("dtype0-isnan", "dtype1-isfinite", "dtype2-isinf")
@pytest.mark.parametrize("f", [torch.isnan, torch.isinf, torch.isfinite])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_integers_and_booleans_are_asked_for_nan(f, dtype):
    x = torch.tensor([0, 1, 5]).to(dtype)
    assert torch.equal(torch.compile(f, backend="kp_tpu")(x), f(x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_of_rows_that_are_written(dynamic):
    def f(x, i):
        return x.index_copy(0, i, x[: i.shape[0]] * 2).mT, x.index_fill(-1, i, 3.0).sum()

    gradients = []
    for run in (f, torch.compile(f, backend="kp_tpu", dynamic=dynamic, options={"precision": "float32"})):
        x = torch.linspace(-1, 1, 20).reshape(4, 5).requires_grad_()
        flat, filled = run(x, torch.tensor([0, 2]))
        ((flat * torch.arange(20.0).reshape(5, 4)).sum() + filled).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.quick("weighted-mean")
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weight", [None, torch.linspace(0.5, 2, 5)], ids=["plain", "weighted"])
def test_losses_of_one_sample(reduction, weight):
    """torch_xla 2.9 ends the process where scores have one dimension."""
    args = torch.linspace(-1, 1, 5).sin().requires_grad_(), torch.tensor(2), weight
    for ignored in (-100, 2):
        how = {"reduction": reduction, "ignore_index": ignored}
        check_gradients_like_eager(lambda x, t, w, how=how: F.nll_loss(x, t, w, **how), *args)
        check_gradients_like_eager(lambda x, t, w, how=how: F.cross_entropy(x, t, w, label_smoothing=0.1, **how), *args)


LONG = torch.tensor([[0, 1, 2, 2], [0, 0, 0, 1]])


@pytest.mark.quick("<lambda>1", "<lambda>3")
@pytest.mark.parametrize(
    "scatter",
    [
        lambda x, i: x.scatter(1, i, 2.0),
        lambda x, i: x.detach().clone().scatter_(1, i, True),
        lambda x, i: x.detach().scatter(1, i, 2.0, reduce="add"),
        lambda x, i: x.detach().scatter(1, i, 2.0, reduce="multiply"),
    ],
)
def test_numbers_are_scattered_by_an_index_longer_than_the_tensor(scatter):
    for rows in (2, 5):
        x = torch.linspace(1, 2, rows * 3).reshape(rows, 3)
        check_like_eager(scatter, x, LONG)
    check_gradients_like_eager(lambda x, i: x.scatter(1, i, 2.0) * 3, x.requires_grad_(), LONG)


@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
def test_gradients_of_a_reduction_without_itself_by_a_longer_index(reduce):
    x, source = torch.linspace(-1, 1, 6).reshape(2, 3), torch.linspace(-2, 1, 8).cos().reshape(2, 4)
    args = x.requires_grad_(), LONG, source.requires_grad_()
    check_gradients_like_eager(lambda x, i, s: x.scatter_reduce(1, i, s, reduce, include_self=False), *args)


def test_gradients_of_a_scatter_by_a_longer_index():
    x, source = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_(), torch.linspace(-2, 1, 8).reshape(2, 4)
    index = torch.tensor([[0, 1, 2, 2], [1, 1, 1, 1]])[:, [0, 1, 2, 2]]
    check_gradients_like_eager(lambda x, i, s: x.scatter(1, i, s).sum(0), x, index, source[:, :1].expand(2, 4))


def test_a_masked_scatter_may_leave_a_part_of_its_source():
    x, source = torch.zeros(2, 3), torch.arange(1.0, 11.0)
    mask = torch.tensor([[True, False, True], [False, True, True]])
    for length in (4, 6, 10):
        check_like_eager(lambda x, m, s: x.masked_scatter(m, s), x, mask, source[:length])
        args = x.requires_grad_(), mask, source[:length].clone().requires_grad_()
        check_gradients_like_eager(lambda x, m, s: x.masked_scatter(m, s), *args)
        x = torch.zeros(2, 3)
    check_like_eager(lambda x, m, s: x.masked_scatter(m, s), torch.tensor(0), torch.tensor(True), torch.arange(1, 4))


FILLS = {
    "full_like": lambda x, v: torch.full_like(x, v),
    "full": lambda x, v: torch.full((3,), v, dtype=torch.bool, device=x.device) ^ x,
    "new_full": lambda x, v: x.new_full((3,), v),
    "fill_": lambda x, v: (~x).fill_(v),
    "masked_fill": lambda x, v: x.masked_fill(~x, v),
    "index_fill": lambda x, v: x.index_fill(0, torch.ones(1, dtype=torch.long, device=x.device), v),
    "scatter": lambda x, v: x.scatter(0, torch.ones(1, dtype=torch.long, device=x.device), v),
    "pad": lambda x, v: F.pad(x, (1, 1), value=v),
    "scalar_tensor": lambda x, v: torch.scalar_tensor(v, dtype=torch.bool, device=x.device) ^ x,
}


@pytest.mark.quick("full_like", "masked_fill", "scatter")
@pytest.mark.parametrize("name", FILLS)
def test_a_fraction_is_true(name):
    """torch_xla 2.9 truncates a number to an integer before it becomes a boolean, and fails for a NaN."""
    for value in (1e-3, -0.5, NAN, 0.0):
        check_like_eager(lambda x, v=value: FILLS[name](x, v), torch.tensor([True, False, False]))


@pytest.mark.quick("False")
@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_of_values_that_a_vector_and_a_number_index(accumulate):
    """torch 2.9's fake tensors take the shape of the last index for that of both."""
    rows, column = torch.tensor([0, 2]), torch.tensor(1)
    for value in (torch.tensor(5.0), torch.tensor([5.0, 6.0])):
        for order in ((rows, column), (column, rows)):
            args = torch.zeros(3, 3).requires_grad_(), *order, value.requires_grad_()
            check_gradients_like_eager(lambda x, i, j, v: x.index_put((i, j), v, accumulate) * 2, *args)
