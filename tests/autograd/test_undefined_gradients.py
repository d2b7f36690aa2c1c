"""Gradients are None where eager's are: of inputs that only lead to results outside the loss."""

import pytest
import torch
from torch import nn

import kp_dynamo.compat.xla as compat

FLOAT32 = {"precision": "float32"}


def two_heads(a, b, c):
    return a * c, b * c


def a_result_and_a_view(a, b, c):
    y = a * c
    return y, y[1:], (b * 2).sum()


def a_written_input(a, b, c):
    c = c * 1
    c.mul_(a)
    return c, b * 3, a + 1


def three(a, b, c):
    return a * b, b * c, (c * a).sum()


def a_gradient_of_zeros(a, b, c):
    """That of `b` hangs on nothing; eager has zeros where the first result is in the loss."""
    return torch.copysign(a, b), a * 2, c * 3


def a_gradient_of_zeros_beside_another(a, b, c):
    """That of `b` in the first result, although it has one in the second as well."""
    return torch.copysign(a, b), b * 2, c.sgn(), c * 3, b.detach().sgn() * a


@pytest.mark.quick(
    "two_heads-xla", "a_result_and_a_view-cpu", "a_written_input-xla", "three-cpu", "a_gradient_of_zeros-xla",
    "a_gradient_of_zeros_beside_another-cpu",
)  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize(
    "f",
    [two_heads, a_result_and_a_view, a_written_input, three, a_gradient_of_zeros, a_gradient_of_zeros_beside_another],
)
def test_gradients_are_undefined_where_eager_s_are(f, device):
    place = compat.device() if device == "xla" else torch.device("cpu")
    compiled = torch.compile(f, backend="kp_tpu", options=FLOAT32)
    for used in range(len(f(*torch.ones(3, 3)))):
        found = []
        for run in (f, compiled):
            leaves = [torch.full((3,), i + 1.0, device=place, requires_grad=True) for i in range(3)]
            run(*leaves)[used].sum().backward()
            # Of `sgn`, eager has zeros without memory.
            found.append([None if leaf.grad is None else leaf.grad.clone().tolist() for leaf in leaves])
        assert found[1] == found[0]


def test_a_padded_input_that_leads_nowhere_gets_no_gradient():
    from kp_dynamo import mark_sequence

    x, y = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    run = torch.compile(lambda x, y: (x > 0, y * 2), backend="kp_tpu", options={**FLOAT32, "buckets": [8]})
    run(mark_sequence(x, 1), mark_sequence(y, 1))[1].sum().backward()
    assert x.grad is None
    assert y.grad.shape == (3, 5)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_parameter_that_is_only_written_to_gets_no_gradient(dynamic):
    weight, other = torch.ones(3, requires_grad=True), torch.ones(4, requires_grad=True)

    def f(x):
        with torch.no_grad():
            weight.mul_(0.5)
        return x * other

    torch.compile(f, backend="kp_tpu", dynamic=dynamic, options=FLOAT32)(torch.ones(5, 4)).sum().backward()
    assert weight.grad is None
    assert other.grad.tolist() == [5, 5, 5, 5]


class _Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        h = self.body(x).tanh()
        return self.first(h), self.second(h)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it where the graph breaks
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_graphs_before_a_graph_break_pass_on_what_is_undefined(device):
    def broken(a, b, c):
        h = torch.tanh(a * c)
        torch._dynamo.graph_break()
        return b * 2, h * 3

    place = compat.device() if device == "xla" else torch.device("cpu")
    leaves = [torch.full((3,), i + 1.0, device=place, requires_grad=True) for i in range(3)]
    first, second = torch.compile(broken, backend="kp_tpu", options=FLOAT32)(*leaves)
    first.sum().backward(retain_graph=True)
    assert [leaf.grad is None for leaf in leaves] == [True, False, True]
    second.sum().backward()
    assert all(leaf.grad.abs().min() > 0 for leaf in leaves)


def returns_an_input(x, y, u, v):
    return x.float(), y * u, v * 3


def returns_a_written_input(x, y, u, v):
    x *= u
    return x, y * v


def returns_nothing(x, y, u, v):
    x *= u
    y *= v


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it of results of the first graph
@pytest.mark.quick("returns_an_input-cpu", "returns_a_written_input-xla", "returns_nothing-cpu")
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("second", [returns_an_input, returns_a_written_input, returns_nothing])
def test_the_results_of_two_graphs_are_told_apart(second, device):
    """A result that is an input belongs to the graph before, whose backward has other undefined gradients."""

    def first(a, b, c, d):
        return a * b, c * d, a + 1

    place = compat.device() if device == "xla" else torch.device("cpu")
    options = {"backend": "kp_tpu", "options": FLOAT32}
    compiled = torch.compile(first, **options), torch.compile(second, **options)
    for used in range(2):
        found = []
        for one, other in ((first, second), compiled):
            leaves = [torch.full((3,), i + 1.0, device=place, requires_grad=True) for i in range(6)]
            x, y, _ = one(*leaves[:4])
            results = other(x, y, *leaves[4:]) or (x, y)
            results[used].sum().backward()
            found.append([None if leaf.grad is None else leaf.grad.tolist() for leaf in leaves])
        assert found[1] == found[0]


def test_an_optimizer_leaves_a_head_alone_that_is_not_used():
    torch.manual_seed(0)
    eager, mine = _Heads(), _Heads()
    mine.load_state_dict(eager.state_dict())
    x = torch.randn(3, 4)
    for model, run in ((eager, eager), (mine, torch.compile(mine, backend="kp_tpu", options=FLOAT32))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        for head in (0, 0, 1, 0):
            optimizer.zero_grad()
            run(x)[head].square().sum().backward()
            optimizer.step()
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(mine.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_a_graph_may_go_backward_twice():
    compiled = torch.compile(two_heads, backend="kp_tpu", options=FLOAT32)
    a, b, c = (torch.ones(3, requires_grad=True) for _ in range(3))
    first, second = compiled(a, b, c)
    first.sum().backward(retain_graph=True)
    assert b.grad is None
    second.sum().backward()
    assert b.grad.tolist() == [1, 1, 1]
    assert a.grad.tolist() == [1, 1, 1]


class ProductAndPower(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y, x.exp()

    @staticmethod
    def backward(ctx, of_product, of_power):
        x, y = ctx.saved_tensors
        return of_product * y + of_power * x.exp(), of_product * x


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("chosen", [0, 1])
def test_a_function_of_the_user_s_gives_each_of_its_inputs_a_gradient(chosen):
    """Autograd calls its backward with zeros for a result that has no gradient."""

    def fn(x, y, z):
        product, power = ProductAndPower.apply(x * 2, y + 1)
        return product + 1, power, z * 3

    compiled = torch.compile(fn, backend="kp_tpu", options=FLOAT32)
    mine, eager = ([torch.ones(3, requires_grad=True) for _ in range(3)] for _ in range(2))
    compiled(*mine)[chosen].sum().backward()
    fn(*eager)[chosen].sum().backward()
    assert [t.grad for t in mine[2:]] == [t.grad for t in eager[2:]] == [None]
    for own, expected in zip(mine[:2], eager[:2], strict=True):
        torch.testing.assert_close(own.grad, expected.grad)
