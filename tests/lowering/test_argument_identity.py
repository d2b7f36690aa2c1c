"""Arguments that a graph reads, overwrites and exchanges: each program input is the argument that the graph reads."""

import pytest
import torch
from torch import nn

import kp_dynamo.compat.xla as compat

FLOAT32 = {"precision": "float32"}


def keep_previous(current, previous, x):
    y = current + previous + x
    previous.copy_(current)
    return y


def read_after(current, previous, x):
    previous.copy_(current)
    return previous * x + current


def exchange(a, b, c):
    t = a.clone()
    a.copy_(b)
    b.copy_(t)
    return a - b + c


def rotate(a, b, c):
    t = a.clone()
    a.copy_(b)
    b.copy_(c)
    c.copy_(t)


def copy_into_a_slice(a, b, c):
    a[1:].copy_(b[:-1])
    b.mul_(2)
    return a + c


def copy_with_a_cast(a, b, c):
    t = a.to(torch.float64)
    a.copy_(b.double() + 1)
    b.copy_(t)
    return c + b


def chain(a, b, c):
    b.copy_(a)
    c.copy_(b)
    a.add_(1)
    return b + c


def broadcast(a, b, c):
    a.copy_(b[0])
    b.copy_(c.sum())
    c.copy_(a)


def results_and_writes(a, b, c):
    t = b * 2
    a.copy_(t)
    return t, b.clone(), c


def copy_many(a, b, c):
    torch._foreach_copy_([a, b], [b * 1, c])
    return a + b


def fill_the_diagonal(a, b, c):
    a.view(3, 1).expand(3, 3).clone().fill_diagonal_(2)
    d = torch.outer(b, c)
    d.fill_diagonal_(7)
    b.copy_(d.sum(0))
    return d


@pytest.mark.quick("xla", "chain-cpu")
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize(
    "f",
    [keep_previous, read_after, exchange, rotate, copy_into_a_slice, copy_with_a_cast, chain, broadcast,
     results_and_writes, copy_many, fill_the_diagonal],
)  # fmt: skip
def test_arguments_are_read_and_written_as_in_eager(f, device):
    place = compat.device() if device == "xla" else torch.device("cpu")
    seen = []
    for run in (f, torch.compile(f, backend="kp_tpu", options=FLOAT32)):
        arguments = [(torch.arange(3.0) + 10 * i + 1).to(place) for i in range(3)]
        results = [run(*arguments) for _ in range(2)]
        seen.append([v.cpu() for v in (*torch.utils._pytree.tree_leaves(results), *arguments) if v is not None])
    for expected, value in zip(*seen, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=0)


class _Memory(nn.Module):
    """Keeps the last input and an average of inputs in buffers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("last", torch.zeros(2, 4))
        self.register_buffer("mean", torch.zeros(2, 4))

    def forward(self, x):
        y = self.linear(x + self.last - self.mean)
        self.last.copy_(x)
        self.mean.lerp_(x, 0.1)
        return y


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_a_module_keeps_its_last_input(device):
    torch.manual_seed(0)
    eager, compiled = _Memory(), _Memory()
    compiled.load_state_dict(eager.state_dict())
    place = compat.device() if device == "xla" else torch.device("cpu")
    compiled.to(place)
    run = torch.compile(compiled, backend="kp_tpu", options=FLOAT32)
    for _ in range(3):
        x = torch.randn(2, 4)
        expected, seen = eager(x), run(x.to(place))
        expected.square().sum().backward()
        seen.square().sum().backward()
        torch.testing.assert_close(seen.cpu(), expected, rtol=1e-5, atol=1e-5)
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name].cpu(), value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(compiled.linear.weight.grad.cpu(), eager.linear.weight.grad, rtol=1e-4, atol=1e-4)


def test_no_operator_may_write_to_an_argument_of_the_trace(monkeypatch):
    from kp_dynamo.lowering.forms import FORMS

    monkeypatch.delitem(FORMS, torch.ops.aten.copy.default)

    def f(a, b):
        t = a * 2
        a.copy_(b)
        return t

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="an operator wrote to an argument"):
        torch.compile(f, backend="kp_tpu")(torch.ones(7), torch.zeros(7))


def test_a_number_that_a_graph_holds_need_not_be_an_input_of_the_program():
    x = torch.randn(3, 4)
    run = torch.compile(lambda x: x.clamp(-0.5, 0.5).kthvalue(2, 0).values, backend="kp_tpu", dynamic=True,
                        options={**FLOAT32, "buckets": [4, 8]})  # fmt: skip
    with torch.no_grad():
        torch.testing.assert_close(run(x), x.clamp(-0.5, 0.5).kthvalue(2, 0).values, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(3, 3), (2, 5), (7, 3), (8, 3), (4, 3), (3, 3, 3)])
@pytest.mark.parametrize("wrap", [False, True])
def test_a_diagonal_is_filled_as_in_eager(shape, wrap):
    def f(x):
        return x.fill_diagonal_(7.0, wrap)

    mine, eager = torch.zeros(shape), torch.zeros(shape)
    torch.testing.assert_close(torch.compile(f, backend="kp_tpu", dynamic=False)(mine), f(eager))
    torch.testing.assert_close(mine, eager)
