"""The autograd function of graphs that only return new tensors: where it is used, and that it is AOTAutograd's."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kp_dynamo.autograd import plain_gradient
from tests.spine import DEVICES, compiled

ROWS = torch.linspace(-2, 3, 12).reshape(3, 4)

# Dynamo asks for the .grad of every input.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def is_plain(result):
    """Whether a result comes from our function; AOTAutograd's has the same name."""
    return getattr(type(result.grad_fn), "_forward_cls", None) is plain_gradient.CompiledFunction


def rows(device):
    return ROWS.clone().to(device).requires_grad_()


def written(x):
    x.add_(1)
    return x.sin()


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_used_where_all_results_are_new_tensors(device):
    assert is_plain(compiled(lambda x: (x @ x.T).sin())(rows(device)))
    assert is_plain(compiled(lambda x: (x * 2).reshape(-1))(rows(device)))
    assert not is_plain(compiled(lambda x: (x * 2, x[1]))(rows(device))[0])
    assert not is_plain(compiled(written)(rows(device) * 1))
    assert type(compiled(torch.sin)(rows(device)).grad_fn).__name__ == "CompiledFunctionBackward"


@pytest.mark.parametrize("device", DEVICES)
def test_undefined_gradients_are_zeros_beside_defined_ones_and_undefined_alone(device):
    def three(x, y):
        z = x * y
        return z.sin(), z.sum(), (x > 0)

    x, y = rows(device), rows(device)
    sine, total, mask = compiled(three)(x, y)
    assert is_plain(sine)
    assert not mask.requires_grad
    given = torch.autograd.grad(sine.sum(), (x, y), retain_graph=True)
    expected = torch.autograd.grad((x * y).sin().sum(), (x, y))
    for mine, eager in zip(given, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), eager.cpu())

    class NoGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a.clone()

        @staticmethod
        def backward(ctx, gradient):
            return None

    (gradient,) = torch.autograd.grad(NoGradient.apply(total), x, allow_unused=True)
    assert gradient is None


@pytest.mark.parametrize("device", DEVICES)
def test_saved_tensor_hooks_of_a_call_see_what_is_saved(device):
    packed = []
    run, x = compiled(lambda x: x.sin().exp()), rows(device)
    run(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t), t)[1], lambda t: t):
        y = run(x)
    y.sum().backward()
    assert packed
    torch.testing.assert_close(x.grad.cpu(), ROWS.cos() * ROWS.sin().exp())


def test_a_checkpoint_around_it_runs_it_again():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    run, x = compiled(model), rows("cpu")
    checkpoint(run, x, use_reentrant=False).sum().backward()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(x.grad, expected)


def test_a_transform_around_its_backward_is_refused_by_name():
    x = rows("cpu")
    y = compiled(lambda x: x.sin().sum())(x)
    with pytest.raises(RuntimeError, match=r"within torch.func's vmap"):
        torch.func.vmap(lambda g: torch.autograd.grad(y, x, g, retain_graph=True)[0])(torch.ones(2))


def test_a_graph_that_records_gradients_for_a_caller_that_does_not():
    def inside(x):
        with torch.enable_grad():
            return (x * 2).sin()

    x = rows("cpu")
    with torch.no_grad():
        y = compiled(inside)(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * (2 * ROWS).cos())


def test_a_backward_does_not_reach_an_input_that_gets_no_gradient():
    """Its own graph may be gone."""
    leaf, x = rows("cpu"), rows("cpu")
    y = leaf.exp()
    result = compiled(lambda x, y: x.sin() * y.detach())(x, y)
    y.sum().backward()
    result.sum().backward()
    torch.testing.assert_close(x.grad, ROWS.cos() * ROWS.exp())


def test_dynamo_looks_into_no_backward_that_a_compiled_function_calls():
    model = nn.Linear(4, 2)

    def step(x):
        model(x).square().sum().backward()

    run = torch.compile(step, backend="kp_tpu", options={"precision": "float32"})
    torch._dynamo.utils.counters.clear()
    run(ROWS)
    given, model.weight.grad = model.weight.grad, None
    step(ROWS)
    torch.testing.assert_close(given, model.weight.grad)
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert [reason.split("\n")[0] for reason in breaks] == ["Unsupported Tensor.backward() call"]
