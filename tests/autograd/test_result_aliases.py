"""Results that are views: they lie where eager's do, and what is written to one is seen through the others."""

import pytest
import torch
import torch.nn.functional as F

import kp_dynamo
import kp_dynamo.compat.xla as compat

FLOAT32 = {"precision": "float32"}
LENGTHS = (6, 10, 8)


def matrix(n):
    return (torch.arange(float(4 * n)).reshape(4, n), torch.arange(40.0).reshape(20, 2))


def of_a_base(n):
    """Arguments that are views themselves, at an offset and transposed."""
    return (torch.arange(60.0)[3 : 3 + n], torch.arange(40.0).reshape(2, 20).t())


VIEWS = {
    "chunk": lambda x, y: x.chunk(2),
    "from a size on": lambda x, y: (y[x.shape[-1] :], x * 2),
    "transposed": lambda x, y: (y[x.shape[-1] // 2 :].t() if y.dim() > 1 else y[1:], x + 1),
    "split": lambda x, y: x.split([2, x.shape[-1] - 2], dim=-1),
    "narrow": lambda x, y: x.narrow(-1, x.shape[-1] // 2, 2),
    "select": lambda x, y: (x.unsqueeze(0).select(-1, x.shape[-1] - 1), y * 1),
    "unfold": lambda x, y: x.unfold(-1, 2, 2),
    "expand": lambda x, y: x[..., :1].expand(*x.shape[:-1], x.shape[-1]),
    "the argument and a part of it": lambda x, y: (x, x[..., 1:]),
    "view": lambda x, y: x.view(-1, 2),
    "windows of a result": lambda x, y: (x * 2).unfold(-1, 3, 1),
    "two that overlap": lambda x, y: (lambda z: (z[..., 1:], z[..., :-1]))(x * 2),
    "a result and a view of it": lambda x, y: (lambda z: (z, z[..., x.shape[-1] // 2 :]))(x * 2),
    "a result and its copy": lambda x, y: (lambda z: (z, z.clone()))(x * 2),
    "after a write": lambda x, y: (x.add_(1)[..., x.shape[-1] - 2 :], y.mul_(2)),
    "through a view": lambda x, y: (x[..., x.shape[-1] // 2 :].mul_(3), y + 0),
}


def _called(run, make, place, is_training):
    """Results, their places in memory, and all tensors after each result has been written to."""
    seen = []
    for n in LENGTHS:
        arguments = [a.to(place) if place.type == "xla" else a for a in make(n)]
        if is_training:
            arguments[0] = arguments[0].detach().requires_grad_()
        results = run(*arguments)
        results = list(results) if isinstance(results, (list, tuple)) else [results]
        seen += [r.detach().cpu().clone() for r in results]
        if place.type == "cpu":
            inside = {a.untyped_storage().data_ptr() for a in arguments}
            is_view = [r.untyped_storage().data_ptr() in inside for r in results]
            seen += [r.storage_offset() if view else -1 for r, view in zip(results, is_view, strict=True)]
            seen += [r.stride() for r in results]
        with torch.no_grad():
            for i, r in enumerate(results):
                if not (is_training and r.requires_grad):
                    r[..., :1].add_(10.0 * (i + 1))
        seen += [t.detach().cpu().clone() for t in (*results, *arguments)]
    return seen


@pytest.mark.quick(
    "from a size on-matrix-cpu", "unfold-matrix-cpu", "expand-matrix-xla", "the argument and a part of it-matrix-xla",
    "two that overlap-matrix-cpu", "a result and its copy-matrix-xla", "after a write-matrix-cpu",
    "through a view-matrix-xla",
)  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("make", [matrix, pytest.param(of_a_base, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", VIEWS)
def test_results_share_memory_as_in_eager(name, make, device):
    place = compat.device() if device == "xla" else torch.device("cpu")
    compiled = torch.compile(VIEWS[name], backend="kp_tpu", dynamic=True, options=FLOAT32)
    with torch.no_grad():
        expected = _called(VIEWS[name], make, place, False)
        seen = _called(compiled, make, place, False)
    torch.testing.assert_close(seen, expected, rtol=0, atol=0)


TRAINED = ("chunk", "split", "narrow", "view", "two that overlap", "a result and a view of it", "select")


@pytest.mark.quick("split-xla", "view-cpu", "two that overlap-cpu", "a result and a view of it-xla", "select-xla")
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_flow_through_results_that_are_views(name, device):
    place = compat.device() if device == "xla" else torch.device("cpu")
    compiled = torch.compile(VIEWS[name], backend="kp_tpu", dynamic=True, options=FLOAT32)
    for n in LENGTHS:
        gradients = []
        for run in (VIEWS[name], compiled):
            x, y = (a.to(place) for a in matrix(n))
            x.requires_grad_()
            results = run(x, y)
            results = results if isinstance(results, (list, tuple)) else [results]
            loss = sum((r * torch.arange(r.shape[-1], device=place)).sum() for r in results if r.requires_grad)
            loss.backward()
            gradients.append(x.grad.cpu())
        torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


@pytest.mark.quick("True-True-xla", "True-False-cpu", "False-True-cpu", "False-False-xla")
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("is_ordinary", [True, False])
@pytest.mark.parametrize("is_dynamic", [True, False])
def test_views_are_returned_in_inference_mode(device, is_ordinary, is_dynamic):
    place = compat.device() if device == "xla" else torch.device("cpu")
    with torch.inference_mode(not is_ordinary):
        x = torch.arange(6.0).reshape(2, 3).to(place)
    with torch.inference_mode():
        flat, rows = torch.compile(lambda x: (x.flatten(), x[1:]), backend="kp_tpu", dynamic=is_dynamic)(x)
        assert flat.tolist() == [0, 1, 2, 3, 4, 5]
        assert rows.tolist() == [[3, 4, 5]]


@pytest.mark.parametrize("is_training", [False, True])
def test_a_copy_that_is_taken_apart_into_views_stays_a_copy(is_training):
    x = torch.zeros(2, 2, 4, 6, requires_grad=is_training)
    result = torch.compile(lambda x: F.channel_shuffle(x, 2), backend="kp_tpu", options=FLOAT32)(x)
    with torch.no_grad():
        result.add_(1)
    assert not x.any()


def test_views_of_arguments_are_not_computed():
    xlac = compat.xlac()
    compiled_before = xlac._xla_counter_value("UncachedCompile")
    x = torch.arange(6.0)
    first, second = torch.compile(lambda x: (x[2:], x.view(2, 3)), backend="kp_tpu")(x)
    assert first.data_ptr() == x.data_ptr() + 8
    assert second.data_ptr() == x.data_ptr()
    assert xlac._xla_counter_value("UncachedCompile") == compiled_before


PIECES = {
    "unbind": lambda x: (x + 1).unbind(-1)[:2],
    "chunk": lambda x: (x + 1).chunk(2, 0),
    "split": lambda x: (x + 1).split([1, x.shape[-1] - 1], -1),
    "of a norm": lambda x: F.batch_norm(x, None, None, training=True).mT.unbind(0),
    "of another's": lambda x: (*(x * 2).unbind(1), *(x * 3).unbind(1)),
}


@pytest.mark.quick("unbind-False-None", "split-True-None", "of a norm-True-None", "of another's-True-None")
@pytest.mark.parametrize("buckets", [None, "pow2"])
@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("name", PIECES)
def test_pieces_of_a_result_lie_in_one_memory(name, is_training, buckets):
    fn = PIECES[name]
    run = torch.compile(fn, backend="kp_tpu", options={**FLOAT32, "buckets": buckets} if buckets else FLOAT32)
    for length in (3, 5, 6):
        x = kp_dynamo.mark_sequence(torch.randn(length, 4, 6), 0).requires_grad_(is_training)
        seen, expected = run(x), fn(x)
        torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-6, check_stride=True)
        assert _shared(seen) == _shared(expected)
        if is_training:
            (mine,), (eager,) = (torch.autograd.grad(sum((r * r).sum() for r in rs), x) for rs in (seen, expected))
            torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-5)


def _shared(results):
    """Who shares a storage with whom, and how far apart they lie there."""
    pairs = [(i, j, a, b) for i, a in enumerate(results) for j, b in enumerate(results) if i < j]
    same = [(i, j, a, b) for i, j, a, b in pairs if a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()]
    return [(i, j, b.storage_offset() - a.storage_offset()) for i, j, a, b in same]


def test_a_result_that_needs_no_gradient_lies_with_one_that_does():
    def pieces(x):
        first, second = (x * 2).unbind(0)
        return first, second.detach()

    x = torch.randn(2, 4, requires_grad=True)
    first, second = torch.compile(pieces, backend="kp_tpu", options=FLOAT32)(x)
    assert (first.requires_grad, second.requires_grad) == (True, False)
    first.sum().backward()
    assert torch.equal(x.grad, torch.tensor([[2.0] * 4, [0.0] * 4]))


def test_a_gradient_that_is_undefined_stays_so_through_shared_memory():
    x, y = torch.randn(2, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    run = torch.compile(lambda x, y: (*(x * 2).unbind(0), y * 3), backend="kp_tpu", options=FLOAT32)
    run(x, y)[0].sum().backward()
    assert y.grad is None


def test_a_view_of_an_input_that_another_view_writes_to_in_inference_mode():
    def flat(x):
        view, other = x.view(-1), x.view(x.shape[0], -1)
        other.add_(1)
        return view

    x = torch.arange(3.0).to(compat.device())
    with torch.inference_mode():
        torch.compile(flat, backend="kp_tpu", options=FLOAT32)(x).mul_(2)
    assert x.tolist() == [2, 4, 6]


def detached_beside_a_view(x):
    h = x * 3
    return h.detach(), h.unsqueeze(1)


def detached_parts(x):
    h = x * 3
    return h.detach()[1:], h.unsqueeze(1), h.detach()


def detached_beside_itself(x):
    h = x * 3
    return h.detach(), h.unsqueeze(1), h


@pytest.mark.quick("detached_beside_a_view-xla", "detached_parts-cpu", "detached_beside_itself-xla")
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("fn", [detached_beside_a_view, detached_parts, detached_beside_itself])
def test_results_that_are_detached_share_memory_and_no_gradient(fn, device):
    found = []
    for run in (fn, torch.compile(fn, backend="kp_tpu", options={"precision": "float32"})):
        x = torch.ones(3, 2).to(device if run is not fn else "cpu").requires_grad_()
        results = run(x)
        needs = [result.requires_grad for result in results]
        results[0].add_(1)
        values = [result.detach().cpu().tolist() for result in results]
        results[1].sum().backward()
        found.append((needs, values, x.grad.cpu().tolist()))
    assert found[0] == found[1]
