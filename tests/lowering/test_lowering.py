"""The default lowering against eager: what goes in and out of a graph. Dtypes: see test_dtypes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.spine import DEVICES, check_like_eager, compiled, counted, on

RAMP = torch.arange(12.0).reshape(3, 4) - 5


def update(x):
    x.add_(1)
    x[0].mul_(3)
    x.t()[1].zero_()
    return x * 2


def update_twice(x, y):
    x.copy_(y.sin())
    y[:, 0] = x[:, 1]
    return x.view(-1), y


def turn(x):
    x.t_().mul_(2)
    return x + 1


@pytest.mark.parametrize(("fn", "args"), [(update, (RAMP,)), (update_twice, (RAMP, RAMP + 1)), (turn, (RAMP,))])
def test_inputs_are_updated_in_place(fn, args):
    check_like_eager(fn, *args)


@pytest.mark.parametrize("device", DEVICES)
def test_an_updated_input_that_is_returned_is_the_caller_s_own(device):
    x = torch.ones(3, device=device)
    view = x[1:]
    result = compiled(lambda x: x.mul_(2))(x)
    assert result is x
    assert view.tolist() == [2, 2]


@pytest.mark.parametrize("device", DEVICES)
def test_an_update_through_a_view_reaches_its_base(device):
    base = torch.zeros(4, device=device)
    compiled(lambda x: x.add_(1))(base[1:3])
    assert base.tolist() == [0, 1, 1, 0]


def test_one_tensor_given_twice():
    x = torch.ones(3)
    check_like_eager(lambda a, b: (a.add_(1), b * 2)[1], x, x)
    check_like_eager(lambda a, b: (a.add_(1), b * 2)[1], x, x.clone())


def test_overlapping_views_of_a_cpu_tensor():
    base, expected = torch.arange(6.0), torch.arange(6.0)
    result = compiled(lambda a, b: (a.add_(1), b * 2)[1])(base[:4], base[2:])
    assert result.tolist() == (expected[:4].add_(1), expected[2:] * 2)[1].tolist()
    assert base.tolist() == expected.tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_results_that_are_views_share_memory_with_their_input(device):
    x = torch.zeros(4, device=device)
    same, detached, rows, column = compiled(lambda x: (x, x.detach(), x.view(2, 2), x[1:2]))(x)
    x.add_(1)
    assert same is x
    assert (detached.sum().item(), rows.sum().item(), column.item()) == (4, 4, 1)


COPIES = {
    "clone": lambda x: x.clone(),
    "to": lambda x: x.to(torch.float32, copy=True),
    "detached": lambda x: x.detach().clone(),
    "equal results": lambda x: (x + 1, x + 1)[0],
    "constant": lambda x: torch.ones(3, device=x.device),
    "tensor": lambda x: torch.tensor([1.0, 1.0, 1.0], device=x.device),
}


@pytest.mark.quick("clone-cpu", "to-xla", "detached-xla", "equal results-cpu", "constant-xla", "tensor-cpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_results_that_are_copies_share_memory_with_nothing(copy, device):
    run, x = compiled(lambda x: (copy(x), copy(x))), torch.ones(3, device=device)
    for _ in range(3):
        result, other = run(x)
        before = other.sum().item()
        result.add_(1)
        assert x.tolist() == [1, 1, 1]
        assert other.sum().item() == before == copy(torch.ones(3)).sum().item()


def test_trees_none_and_numbers_come_back_as_they_are():
    check_like_eager(lambda x: {"a": x + 1, "b": [None, (x, 3, "s", 2.5)]}, RAMP)
    check_like_eager(lambda x, scale, note: (x * scale, scale, note), RAMP, 2.5, None)
    check_like_eager(lambda x: (*x.max(0), *x.split(2), x.shape[0]), RAMP)


def test_constants_and_lists_of_numbers():
    check_like_eager(lambda x: x + torch.tensor([[1.0], [2.0], [3.0]], device=x.device), RAMP)
    check_like_eager(lambda x: x[[0, 2]] + x.new_tensor([1, 2, 3, 4]), RAMP)


def test_factories_without_an_input():
    result = compiled(lambda: (torch.arange(4) * 2, torch.full((2,), -0.0), torch.empty(0)))()
    assert [r.tolist() for r in result] == [[0, 2, 4, 6], [-0.0, -0.0], []]
    assert str(result[1].tolist()) == "[-0.0, -0.0]"
    assert compiled(lambda: torch.arange(4, device="xla"))().device.type == "xla"


def test_no_dimensions_and_no_elements():
    check_like_eager(lambda x: (x + 1, x.reshape(1), x.expand(2)), torch.tensor(2.0))
    check_like_eager(lambda x: (x + 1, x.sum(), x.sum(0), torch.cat([x, x]), x @ x.new_ones(3, 2)), torch.empty(0, 3))


NON_CONTIGUOUS = {
    "transposed": RAMP.t(),
    "every other": torch.arange(24.0).reshape(6, 4)[::2],
    "expanded": torch.arange(4.0).expand(3, 4),
    "offset": torch.arange(14.0)[2:].reshape(3, 4),
    "channels last": torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("x", NON_CONTIGUOUS.values(), ids=NON_CONTIGUOUS)
def test_non_contiguous_inputs(x):
    # Twice with the same tensor: the second time the placement keeps a copy.
    run = compiled(lambda x: x * 2 + 1)
    for _ in range(3):
        result = run(x)
        torch.testing.assert_close(result, x * 2 + 1, check_stride=True)


def strided(x):
    y = x * 2
    return (
        y.t(),
        y[:, ::2],
        y.t().clone(),
        x.t() + 1,
        x.sum().expand(3, 2),
        y.contiguous(memory_format=torch.preserve_format),
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_results_on_the_cpu_have_the_strides_of_eager(dynamic):
    run = compiled(strided, dynamic=dynamic)
    for rows in (3, 5):
        x = torch.arange(rows * 4.0).reshape(rows, 4)
        assert [r.stride() for r in run(x)] == [r.stride() for r in strided(x)]


def test_shapes_are_compared_where_sizes_are_symbols():
    """torch_xla returns V in the place of its adjoint: of other sizes, which a symbol must not hide."""

    def f(x):
        return torch.linalg.svdvals(x).mean(0)

    # Of full rank: at a singular value of 0 a gradient is one of many.
    x = torch.randn(6, 3, 6, generator=torch.Generator().manual_seed(0))
    mine, eager = (x.clone().requires_grad_() for _ in range(2))
    torch.testing.assert_close(compiled(f, dynamic=True)(mine), f(eager), rtol=1e-4, atol=1e-5)
    compiled(f, dynamic=True)(mine).sum().backward()
    f(eager).sum().backward()
    torch.testing.assert_close(mine.grad, eager.grad, rtol=1e-3, atol=1e-4)


def test_gradients_have_the_strides_of_eager():
    conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    x = NON_CONTIGUOUS["channels last"].clone().requires_grad_()
    leaves = (x, conv.weight)
    eager = torch.autograd.grad(conv(x).sum(), leaves)
    mine = torch.autograd.grad(compiled(conv)(x).sum(), leaves)
    assert [g.stride() for g in mine] == [g.stride() for g in eager]


class Tied(nn.Module):
    """An embedding whose weight is the head's as well."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def test_the_gradient_of_a_tied_weight_is_the_sum_of_both():
    model, tokens = Tied(), torch.tensor([1, 5, 5])
    (eager,) = torch.autograd.grad(model(tokens).square().sum(), model.parameters())
    (mine,) = torch.autograd.grad(compiled(model)(tokens).square().sum(), model.parameters())
    torch.testing.assert_close(mine, eager)


def test_a_cache_of_keys_is_written_in_place():
    def attend(cache, position, new):
        cache.index_copy_(0, position, new)
        return cache.sum(0)

    check_like_eager(attend, torch.zeros(6, 3), torch.tensor([1, 4]), torch.ones(2, 3))


def test_batch_norm_updates_its_statistics():
    for device in DEVICES:
        expected, model = nn.BatchNorm1d(4), nn.BatchNorm1d(4).to(device)
        run = compiled(model)
        for _ in range(2):
            torch.testing.assert_close(run(RAMP.to(device)).cpu(), expected(RAMP))
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name].cpu(), value)


def test_regions_compiled_once_and_called_twice():
    @torch.compiler.nested_compile_region
    def block(x, w):
        return (x @ w).relu() + torch.ones(4, device=x.device)

    check_like_eager(lambda x, w, v: block(block(x, w), v), RAMP, torch.eye(4), torch.eye(4) * 2)


def test_attention_and_embeddings_with_mixed_index_dtypes():
    q = torch.linspace(-1, 1, 24).reshape(1, 2, 3, 4)
    check_like_eager(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), q)
    rows, columns = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([1, 3])
    check_like_eager(lambda x, i, j: (x[i, j], x.index_put((i, j), x.new_zeros(2))), RAMP, rows, columns)


def test_tracing_leaves_pending_work_of_the_user_alone():
    pending = torch.ones(3, device="xla") * 2
    with counted() as counts:
        compiled(lambda x: x * 3.25)(torch.ones(5, device="xla"))
    assert counts.programs == 1
    assert (pending + 1).tolist() == [3, 3, 3]


def test_an_input_that_is_still_pending_is_computed_first():
    x = torch.ones(3, device="xla")
    for _ in range(3):
        x = compiled(lambda x: x + 1)(x * 2)
    assert x.tolist() == [15, 15, 15]


def test_the_arguments_of_a_call_stay_with_the_caller():
    for device in DEVICES:
        arguments = on(device, [RAMP, RAMP * 2])
        compiled(lambda pair: pair[0] + pair[1])(arguments)
        assert [a.shape for a in arguments] == [RAMP.shape, RAMP.shape]


def test_a_tensor_of_numbers_is_made_on_the_device_without_being_told():
    """A decomposition leaves the device out. On the CPU, the tensor took what reads it along."""
    aten = torch.ops.aten

    def halves(n):
        two = aten.scalar_tensor(2, dtype=torch.int64)
        return aten.div.Tensor_mode(n - 1, two, rounding_mode="floor") + aten.full([3], 1.5) + aten.arange.start(0, 3)

    n = torch.tensor(7.0)
    found = compiled(halves, precision="float32", strict=True)(n)
    torch.testing.assert_close(found, halves(n))
