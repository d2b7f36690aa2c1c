"""Results that are views: they lie where eager's do, and what is written to one is seen through the others."""

import pytest
import torch
import torch.nn.functional as F

import kp_dynamo.compat as compat

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


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("make", [matrix, of_a_base])
@pytest.mark.parametrize("name", VIEWS)
def test_results_share_memory_as_in_eager(name, make, device):
    place = compat.device() if device == "xla" else torch.device("cpu")
    compiled = torch.compile(VIEWS[name], backend="kp_tpu", dynamic=True, options=FLOAT32)
    with torch.no_grad():
        expected = _called(VIEWS[name], make, place, False)
        seen = _called(compiled, make, place, False)
    torch.testing.assert_close(seen, expected, rtol=0, atol=0)


TRAINED = ("chunk", "split", "narrow", "view", "two that overlap", "a result and a view of it", "select")


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
