"""`donate="mutated"`: results take the buffers of what a graph overwrites, and whatever lives on keeps its values."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_xla
from torch import nn

from kp_dynamo import clear_cache
from kp_dynamo.exceptions import TPUConfigurationError, XLACompilationError
from kp_dynamo.lowering import DONORS
from kp_dynamo.telemetry import TELEMETRY
from tests.spine import DEVICES, check_like_eager, compiled, counted

OPTIMIZERS = {
    "sgd": lambda parameters, _: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adam": lambda parameters, device: torch.optim.Adam(parameters, 0.05, capturable=device == "xla"),
    "adamw foreach": lambda parameters, device: torch.optim.AdamW(
        parameters, 0.05, foreach=True, capturable=device == "xla"
    ),
}
X = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))


def trained(device, make_optimizer, donate, num_steps=5):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Linear(3, 4).to(device)
    optimizer = make_optimizer(model.parameters(), device)
    run, step, x = compiled(model, donate=donate), compiled(optimizer.step, donate=donate), X.to(device)
    for _ in range(num_steps):
        optimizer.zero_grad()
        run(x).square().mean().backward()
        step()
    return model, optimizer


def on_cpu(tree):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), tree)


@pytest.mark.quick("adamw foreach-xla")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make_optimizer", [*OPTIMIZERS.values()], ids=[*OPTIMIZERS])
def test_steps_and_state_are_the_same(device, make_optimizer):
    results = []
    for donate in ("off", "mutated"):
        model, optimizer = trained(device, make_optimizer, donate)
        results.append(on_cpu([model.state_dict(), optimizer.state_dict()]))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_a_fused_step_is_the_same():
    def fused(parameters, _):
        return torch.optim.AdamW(parameters, 0.05, fused=True)

    results = [on_cpu(list(trained("cpu", fused, donate)[0].parameters())) for donate in ("off", "mutated")]
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


class Accumulated:
    """A tensor on the device that a compiled function adds 1 to, and whose old buffer that function takes."""

    def __init__(self):
        torch._dynamo.reset()
        self.tensor = torch.zeros(4).to("xla")
        self._run = compiled(_add_one, donate="mutated")
        for _ in range(2):
            self.step()

    def step(self):
        """How many buffers had to be copied."""
        before = TELEMETRY.counts["copied_before_donation"]
        self._run(self.tensor)
        return TELEMETRY.counts["copied_before_donation"] - before

    @property
    def value(self):
        return self.tensor.cpu().tolist()[0]


def _add_one(x):
    x.add_(1)


def test_a_buffer_is_taken_and_not_copied():
    accumulated = Accumulated()
    taken = DONORS._notes[accumulated.tensor].holder
    assert taken.cpu().tolist() == [2.0] * 4
    assert accumulated.step() == 0
    with pytest.raises(RuntimeError, match="Trying to access XLA data"):
        taken.cpu()
    assert accumulated.value == 3


def assigned(tensor):
    other = torch.zeros(4).to("xla")
    return other.copy_(tensor)


LIVES_ON = {
    "a clone": torch.clone,
    "a deep copy": copy.deepcopy,
    "the target of copy_": assigned,
    "an operation that has not run": lambda t: t * 1,
    "a clone of a view": lambda t: t.detach().clone(),
    "a clone of a reshaped view": lambda t: t.view(2, 2).clone().view(4),
    "a clone of data": lambda t: t.data.clone(),
}


@pytest.mark.parametrize("share", [*LIVES_ON.values()], ids=[*LIVES_ON])
def test_tensors_that_share_the_buffer_keep_their_value(share):
    accumulated = Accumulated()
    kept = share(accumulated.tensor)
    assert accumulated.step() == 1
    assert accumulated.step() == 0
    assert accumulated.value == 4
    assert kept.cpu().tolist() == [2.0] * 4


VIEWS = {"detach": torch.detach, "data": lambda t: t.data, "view": lambda t: t.view(2, 2), "slice": lambda t: t[:2]}


@pytest.mark.parametrize("view", [*VIEWS.values()], ids=[*VIEWS])
def test_views_see_the_updated_tensor(view):
    accumulated = Accumulated()
    seen = view(accumulated.tensor)
    for expected in (3, 4, 5):
        accumulated.step()
        # A clone of a view of before the step, whose view dies: nothing but the clone tells that the buffer is shared.
        kept = seen.clone()
        assert seen.flatten().cpu().tolist()[0] == expected
        accumulated.step()
        accumulated.tensor.sub_(1)
        assert kept.flatten().cpu().tolist()[0] == expected
    del seen
    kept = accumulated.tensor.clone()
    accumulated.step()
    assert kept.cpu().tolist() == [5.0] * 4


def test_a_tensor_that_was_assigned_is_not_taken_from_its_source():
    source, accumulated = torch.full((4,), 7.0).to("xla"), Accumulated()
    accumulated.tensor.copy_(source)
    compiled(lambda x: x * 2)(accumulated.tensor)  # now the buffer looks like one of its own
    accumulated.step()
    assert accumulated.value == 8
    assert source.cpu().tolist() == [7.0] * 4


def test_a_state_dict_that_is_loaded_stays():
    model, optimizer = trained("xla", OPTIMIZERS["adamw foreach"], "mutated", num_steps=2)
    best = copy.deepcopy(model.state_dict())
    expected = on_cpu(best)
    step = compiled(optimizer.step, donate="mutated")
    for _ in range(2):
        step()
    model.load_state_dict(best)
    step()
    torch.testing.assert_close(on_cpu(best), expected, rtol=0, atol=0)
    assert not torch.equal(model.weight.cpu(), expected["weight"])


def _move(a, b):
    a.add_(b)
    return a * b


def _old_and_new(a):
    old = a.clone()
    a.add_(1)
    return old, a


def _same_twice(a):
    a.mul_(2)
    return a.clone(), a.clone()


def _update_cache(keys, new, positions):
    keys.index_copy_(1, positions, new)
    return keys.sum(1)


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (_move, (torch.ones(3), torch.full((3,), 2.0))),
        (_old_and_new, (torch.ones(3),)),
        (_same_twice, (torch.ones(3),)),
        (lambda a: a.t_(), (torch.arange(6.0).view(2, 3),)),
        (_update_cache, (torch.zeros(2, 8, 4), torch.ones(2, 1, 4), torch.tensor([3]))),
        (lambda a: a[:2].add_(1), (torch.zeros(4),)),
        (lambda a: a.copy_(a.cumsum(0)).unique(), (torch.ones(4, dtype=torch.int64),)),
    ],
    ids=["two", "old and new", "new twice", "metadata", "cache", "part", "partly on the CPU"],
)
@pytest.mark.filterwarnings("ignore")
def test_like_eager(fn, args):
    check_like_eager(fn, *args, donate="mutated")


def test_one_tensor_as_two_arguments():
    for donate in ("off", "mutated"):
        torch._dynamo.reset()
        x, run = torch.ones(3).to("xla"), compiled(_move, donate=donate)
        for expected in (2.0, 4.0):
            assert run(x, x).cpu().tolist() == [expected**2] * 3
            assert x.cpu().tolist() == [expected] * 3


def test_two_tensors_with_one_buffer():
    a = torch.ones(3).to("xla")
    b, run = assigned_like(a), compiled(_move, donate="mutated")
    assert run(a, b).cpu().tolist() == [2.0] * 3
    b.copy_(a)
    assert run(a, b).cpu().tolist() == [8.0] * 3
    assert (a.cpu().tolist(), b.cpu().tolist()) == ([4.0] * 3, [2.0] * 3)


def assigned_like(tensor):
    return torch.zeros_like(tensor).copy_(tensor)


def test_a_result_that_is_also_a_new_value_is_not_taken_later():
    x, run = torch.ones(3).to("xla"), compiled(_same_twice, donate="mutated")
    results = [run(x)[0] for _ in range(4)]
    assert [r.cpu().tolist()[0] for r in results] == [2.0, 4.0, 8.0, 16.0]


@pytest.mark.parametrize("donate", ["off", "mutated"])
@pytest.mark.parametrize("device", DEVICES)
def test_what_the_backward_needs_is_kept(device, donate):
    """AOTAutograd saves the overwritten input itself, in the place of the clone that was made before."""

    def scaled(x, scale):
        y = (x * scale.clone()).sum()
        with torch.no_grad():
            scale.add_(1)
        return y

    x, scale = torch.ones(3).to(device).requires_grad_(), torch.full((3,), 2.0).to(device)
    run = compiled(scaled, donate=donate)
    for expected in (2.0, 3.0, 4.0):
        [gradient] = torch.autograd.grad(run(x, scale), x)
        assert gradient.cpu().tolist() == [expected] * 3
    assert scale.cpu().tolist() == [5.0] * 3


@pytest.mark.quick("xla")
@pytest.mark.parametrize("device", DEVICES)
def test_running_statistics_are_as_without(device):
    found = []
    for donate in ("off", "mutated"):
        torch._dynamo.reset()
        norm = nn.BatchNorm1d(3).to(device)
        run = compiled(norm, donate=donate)
        for _ in range(3):
            run(X.to(device)).sum().backward()
        found.append(on_cpu(norm.state_dict()))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_a_cache_that_grows_step_by_step_is_not_copied():
    keys, run = torch.zeros(2, 8, 4).to("xla"), compiled(_update_cache, donate="mutated")
    expected, copies = torch.zeros(2, 8, 4), []
    for i in range(4):
        new, position = torch.full((2, 1, 4), float(i)), torch.tensor([i])
        before = TELEMETRY.counts["copied_before_donation"]
        found = run(keys, new.to("xla"), position.to("xla"))
        copies.append(TELEMETRY.counts["copied_before_donation"] - before)
        torch.testing.assert_close(found.cpu(), _update_cache(expected, new, position))
    assert copies == [1, 0, 0, 0]


def test_strict_names_what_is_kept():
    run = compiled(_old_and_new, donate="mutated", strict=True)
    with pytest.raises(Exception, match="the graph returns its old value") as caught:
        run(torch.ones(3).to("xla"))
    assert isinstance(caught.value.inner_exception, XLACompilationError)


def test_equal_graphs_that_overwrite_and_that_do_not_are_two_programs():
    def pure(x):
        return (x + 1,)

    clear_cache()
    x = torch.ones(3).to("xla")
    with counted() as counts:
        compiled(pure, donate="mutated")(x)
        compiled(_add_one, donate="mutated")(x)
    assert counts.programs == 2
    assert x.cpu().tolist() == [2.0] * 3


def test_a_program_says_which_inputs_it_may_take(monkeypatch):
    xlac, donors = torch_xla._XLAC, []
    mark = xlac._set_buffer_donation
    monkeypatch.setattr(xlac, "_set_buffer_donation", lambda t, on: donors.append(tuple(t.shape)) or mark(t, on))
    clear_cache()
    torch._dynamo.reset()
    a, b = torch.ones(3, 2).to("xla"), torch.ones(2).to("xla")
    for donate, expected in (("off", []), ("mutated", [(3, 2)])):
        torch._dynamo.reset()
        compiled(_move, donate=donate)(a, b)
        assert donors == expected


def test_the_lowering_of_torch_xla_is_refused():
    with pytest.raises(Exception, match="lowering='stock'") as caught:
        compiled(_add_one, donate="mutated", lowering="stock")(torch.ones(3))
    assert isinstance(caught.value.inner_exception, TPUConfigurationError)
