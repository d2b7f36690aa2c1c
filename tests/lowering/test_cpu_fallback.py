"""Operators that XLA lacks run on the CPU: right, counted, named once with the user's line, an error if strict."""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kp_dynamo import XLACompilationError, clear_cache
from kp_dynamo.telemetry import snapshot
from tests.spine import DEVICES, check_gradients_like_eager, check_like_eager, compiled, counted

MATRIX = torch.tensor([[2.0, 1.0, 0.5], [0.0, 3.0, 1.0], [1.0, 0.0, 4.0]])
HERE = re.escape(__file__)


def eigenvalues(x):
    return torch.linalg.eigvals(x @ x.T).real * 2


def line_of_eigenvalues():
    return rf"{HERE}:{eigenvalues.__code__.co_firstlineno + 1} in eigenvalues"


def test_results_and_gradients_are_those_of_eager():
    with counted() as counts:
        check_like_eager(lambda x: eigenvalues(x) * torch.tensor([1.0, 2.0, 3.0], device=x.device), MATRIX)
    assert counts.fallbacks == 4
    with counted() as counts:
        check_gradients_like_eager(lambda x: torch.linalg.matrix_exp(x * 0.2) + 1, MATRIX.clone().requires_grad_())
    assert counts.fallbacks == 4


def test_two_of_them_with_programs_before_between_and_after():
    with counted() as counts:
        check_like_eager(lambda x: torch.linalg.matrix_exp((eigenvalues(x) * 0.02 - 1).diag()).abs() + 1, MATRIX)
    assert (counts.programs, counts.fallbacks) == (6, 8)


def test_each_run_is_counted_with_the_bytes_that_move():
    run = compiled(eigenvalues)
    for device in DEVICES:
        before = snapshot()
        for _ in range(3):
            run(MATRIX.to(device))
        after = snapshot()
        name = "aten.linalg_eig.default"
        assert after["fallbacks"][name] - before["fallbacks"].get(name, 0) == 3
        # Nine float32 there, three complex64 back; nobody asked for the vectors.
        assert after["fallback_bytes"] - before["fallback_bytes"] == 3 * (9 * 4 + 3 * 8)


def test_one_warning_names_the_operator_and_the_line(caplog, monkeypatch):
    monkeypatch.setattr("kp_dynamo.telemetry.warn_once._logged", set())
    clear_cache()
    with caplog.at_level("WARNING", "kp_dynamo"):
        for _ in range(2):
            compiled(eigenvalues)(MATRIX)
            clear_cache()
            torch._dynamo.reset()
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert re.match(rf"aten\.linalg_eig\.default at {line_of_eigenvalues()} has no XLA lowering", warning)


def through_functional(x):
    return F.rrelu(x, 0.5, 0.5, training=True)


def test_the_line_is_the_user_s_and_not_torch_s(caplog, monkeypatch):
    monkeypatch.setattr("kp_dynamo.telemetry.warn_once._logged", set())
    compiled(through_functional)(MATRIX)
    assert f"{__file__}:{through_functional.__code__.co_firstlineno + 1} in through_functional" in caplog.text


@pytest.mark.parametrize("device", DEVICES)
def test_strict_raises_with_operator_and_line(device):
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        compiled(eigenvalues, strict=True)(MATRIX.to(device))
    assert isinstance(raised.value.inner_exception, XLACompilationError)
    expected = rf"strict=True and XLA has no lowering for: aten\.linalg_eig\.default \(at {line_of_eigenvalues()}\)"
    assert re.search(expected, str(raised.value))


def test_strict_is_silent_where_nothing_falls_back():
    assert compiled(lambda x: x * 2, strict=True)(torch.ones(2)).tolist() == [2, 2]


def test_with_dynamic_shapes():
    run = compiled(lambda x: eigenvalues(x).sum() * x.shape[0], dynamic=True)
    for size in (2, 3):
        x = MATRIX[:size, :size]
        with counted() as counts:
            torch.testing.assert_close(run(x), eigenvalues(x).sum() * size)
        assert counts.fallbacks == 1


def test_a_view_with_a_symbolic_stride_that_crosses_a_cut():
    def cropped(x):
        first = (x * 2)[:, :2]
        mean = x.mode(1).values.mean()
        return first + mean, x + mean

    check_like_eager(cropped, torch.randn(3, 5), dynamic=True)


@torch.library.custom_op("kp_tests::sine", mutates_args=())
def sine(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.sin(x.detach().cpu().numpy())).to(x.device)


@sine.register_fake
def _(x):
    return torch.empty_like(x)


CALLS = []


@torch.library.custom_op("kp_tests::count", mutates_args=())
def count(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(x.shape)
    return x + len(CALLS)


@count.register_fake
def _(x):
    return torch.empty_like(x)


@pytest.mark.parametrize("device", DEVICES)
def test_an_operator_of_the_user_s_own_is_run_and_never_frozen(device):
    CALLS.clear()
    run = compiled(lambda x: torch.ops.kp_tests.count(torch.ops.kp_tests.sine(x) * 0))
    with counted() as counts:
        assert [run(torch.ones(1, device=device)).item() for _ in range(3)] == [1, 2, 3]
    assert counts.fallbacks == 6


def test_operators_of_the_user_s_own_run_in_the_order_of_the_model():
    def fn(x):
        first = torch.ops.kp_tests.count(torch.ops.kp_tests.count(x) * 2)
        return first, torch.ops.kp_tests.count(x)

    CALLS.clear()
    expected = fn(torch.ones(1))
    CALLS.clear()
    with counted() as counts:
        assert compiled(fn)(torch.ones(1)) == expected
    assert counts.programs == 1


def test_a_sort_of_operator_that_needs_a_value():
    check_like_eager(lambda x: x * torch.linalg.matrix_rank(x), MATRIX)


@pytest.mark.quick("<lambda>0-cpu", "<lambda>1-xla", "<lambda>2-xla")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "pending",
    [
        lambda x: torch.complex(x, 2 * x).conj().imag,
        lambda x: torch.linalg.eigvals(x[:, :3]).conj().imag + 1,
        lambda x: torch._neg_view(x) * 2,
    ],
)
def test_results_of_cpu_operators_have_nothing_pending(pending, device):
    x = torch.randn(3, 4)
    run = compiled(pending)
    torch.testing.assert_close(run(x.to(device)).cpu(), pending(x), rtol=1e-5, atol=1e-6)


OF_A_MATRIX = {
    "det": torch.linalg.det,
    "slogdet": lambda w: torch.linalg.slogdet(w)[1],
    "solve": lambda w: torch.linalg.solve(w, w.new_ones(3, 2)),
}


@pytest.mark.quick("view-det", "view-solve", "computed-slogdet")
@pytest.mark.parametrize("name", OF_A_MATRIX)
@pytest.mark.parametrize("view", [lambda w: w.mT, lambda w: (w * 2).mT.clone()], ids=["view", "computed"])
def test_gradients_through_an_lu_of_a_transposed_matrix(name, view):
    """ATen factors the transpose of a contiguous matrix, and its backward asks the strides which one it was."""
    w = torch.tensor([[2.0, -1.0, 0.5], [0.3, 1.5, -0.7], [-0.2, 0.4, 1.1]], requires_grad=True)
    check_gradients_like_eager(lambda w: OF_A_MATRIX[name](view(w)), w)


@pytest.mark.parametrize("device", DEVICES)
def test_the_cpu_is_given_the_imaginary_part_of_complex128(device):
    x = torch.randn(3, 3, dtype=torch.complex128)
    run = compiled(lambda x: torch.view_as_real(torch.linalg.matrix_exp(x * 0.5)))
    torch.testing.assert_close(run(x.to(device)).cpu(), torch.view_as_real(torch.linalg.matrix_exp(x * 0.5)))


@pytest.mark.parametrize("device", DEVICES)
def test_an_argument_that_is_saved_and_written_to(device):
    """The backward of the product wants the buffer as it was: a clone, which compiles to nothing."""
    x = torch.randn(3, 3, requires_grad=True)

    def fn(x, buffer):
        y = torch.linalg.slogdet(x * buffer.clone() + 3 * torch.eye(3, device=x.device))[1]
        buffer.add_(1)
        return y

    mine, eager = torch.ones(3, 3).to(device), torch.ones(3, 3)
    leaf = x.detach().to(device).requires_grad_()
    gradients = torch.autograd.grad(compiled(fn)(leaf, mine), leaf), torch.autograd.grad(fn(x, eager), x)
    torch.testing.assert_close(gradients[0][0].cpu(), gradients[1][0])
    torch.testing.assert_close(mine.cpu(), eager)


@pytest.mark.parametrize("device", DEVICES)
def test_the_cpu_is_given_what_was_written_into_an_expanded_tensor(device):
    """torch 2.9 takes the strides of the result for those of the expanded tensor, 0."""

    def fn(x):
        whole = torch.tensor(0j).expand(3, 3).slice_scatter(x * 0.5, 1, 0, 2)
        return torch.view_as_real(torch.linalg.matrix_exp(whole))

    x = torch.randn(3, 2, dtype=torch.complex64)
    torch.testing.assert_close(compiled(fn)(x.to(device)).cpu(), fn(x))
