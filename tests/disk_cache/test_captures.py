"""Captures that are loaded instead of compiled: their values, and what is stored."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch._aot_autograd import schemas

import kp_dynamo
from kp_dynamo.autograd import interface
from kp_dynamo.disk_cache import eviction
from kp_dynamo.lowering import program
from kp_dynamo.passes.base import PassReport
from kp_dynamo.session import capture_record, stored_captures
from kp_dynamo.telemetry import snapshot
from tests.disk_cache.captured import Captures, counted
from tests.spine import compiled

STORED = {"stored": 1, "misses": {"absent": 1}}
LOADED = {"loaded": 1}


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Captures:
    return Captures(tmp_path / "captures", monkeypatch)


@pytest.fixture(params=["cpu", "xla"])
def device(request) -> str:
    return request.param


def parts(value):
    """What must be equal of a result: its bits, and what autograd and a caller see."""
    if not isinstance(value, torch.Tensor):
        return value
    host = value.detach().cpu()
    stride = host.stride() if value.device.type == "cpu" else None
    return value.dtype, stride, value.requires_grad, value.is_leaf, host.tolist()


def train(model: nn.Module, *inputs: torch.Tensor, device: str, **options):
    """Two steps of a model that is made anew: results, gradients and buffers."""
    torch.manual_seed(0)
    placed = model().to(device).train()
    run = compiled(placed, **options)
    results = []
    for _ in range(2):
        result = run(*(x.to(device) for x in inputs))
        result.square().mean().backward()
        results.append(result)
    found = [*results, *(p.grad for p in placed.parameters()), *placed.buffers(), torch.rand(1)]
    return [parts(value) for value in found]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens).tanh())


IMAGES, ROWS, TOKENS = torch.randn(2, 2, 9, 9), torch.randn(3, 4), torch.tensor([[1, 2, 3]])
TRAINED = {
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.4), nn.Linear(8, 2)), ROWS),
    "running statistics": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.MaxPool2d(2)), IMAGES),
    "tied weights": (Tied, TOKENS),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), ROWS[None]),
}


@pytest.mark.quick("cpu-dropout", "xla-running statistics")
@pytest.mark.parametrize("name", TRAINED)
def test_training_from_a_stored_capture(kept, device, name):
    """Bits of results, gradients, buffers and of torch's generator after the steps, and eager's values."""
    make, x = TRAINED[name]
    one, two, first, second = kept.twice(lambda: train(make, x, device=device))
    assert (first, second) == (STORED, LOADED)
    assert one == two


def test_nothing_is_traced(kept):
    model = nn.Linear(4, 4)
    counts = []
    for _ in range(2):
        kept.new_process()
        before = snapshot()
        compiled(model)(ROWS).sum().backward()
        after = snapshot()
        num_reports = len(after["passes"]) - len(before["passes"])
        counts.append((after["aot_traces"] - before["aot_traces"], num_reports > 0))
    assert counts == [(1, True), (0, False)]


def differentiate(function, *shapes, device="cpu", backward=None):
    """Results and gradients of a compiled function."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(device).requires_grad_() for shape in shapes]
    results = compiled(function)(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    (backward or (lambda results: sum(r.sum() for r in results).backward()))(results)
    return [parts(value) for value in (*results, *(x.grad for x in inputs))]


def _no_grad_part(a, b):
    with torch.no_grad():
        c = a * b
    return c + 1, a * c


GRADIENTS = {
    "undefined gradients": (lambda a, b: (a.exp(), b.sin() * a.detach()), lambda r: r[1].sum().backward()),
    "twice": (lambda a, b: (a * b).exp(), lambda r: [r[0].sum().backward(retain_graph=True) for _ in range(2)]),
    "results without a gradient": (_no_grad_part, lambda r: r[1].sum().backward()),
    "integers": (lambda a, b: ((a > b).sum(), a.argmax(), a * b), lambda r: r[2].sum().backward()),
    "a result twice": (lambda a, b: (a * b,) * 2, None),
}


@pytest.mark.quick("xla-undefined gradients", "cpu-results without a gradient")
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_a_stored_capture(kept, device, name):
    function, backward = GRADIENTS[name]
    one, two, first, second = kept.twice(lambda: differentiate(function, 3, 3, device=device, backward=backward))
    assert (first, second) == (STORED, LOADED)
    assert one == two


def _message(call) -> str:
    with pytest.raises(RuntimeError) as raised:
        call()
    return str(raised.value)


def _double_backward():
    x = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(compiled(lambda x: (x.exp() * x).sum())(x), x, create_graph=True)
    return _message(lambda: gradient.sum().backward())


def _changed_argument():
    weight, x = torch.ones(3, requires_grad=True), torch.ones(3)
    result = compiled(lambda weight, x: weight * x * x)(weight, x)
    x.add_(1)
    return _message(lambda: result.sum().backward())


def _second_backward():
    x = torch.ones(3, requires_grad=True)
    result = compiled(lambda x: x.exp() + 2)(x).sum()
    result.backward()
    return _message(result.backward)


@pytest.mark.quick("_changed_argument")
@pytest.mark.parametrize("call", [_double_backward, _changed_argument, _second_backward])
def test_errors_of_a_stored_capture(kept, call):
    one, two, first, second = kept.twice(call)
    assert (first, second) == (STORED, LOADED)
    assert one == two


@pytest.mark.quick("cpu")
def test_an_input_that_is_written_to(kept, device):
    def call():
        weight, x = torch.full((3,), 2.0).to(device).requires_grad_(), torch.ones(3).to(device)
        counter = torch.zeros(3).to(device)
        results = [compiled(lambda w, x, c: (c.add_(x), w * c)[1])(weight, x, counter) for _ in range(2)]
        results[1].sum().backward()
        return [parts(value) for value in (*results, counter, weight.grad)]

    one, two, first, second = kept.twice(call)
    assert (first["stored"], second["loaded"]) == (1, 1)
    assert one == two


@pytest.mark.slow
def test_modes_around_a_call(kept, device):
    """Each is another capture: a gradient, none, inference mode, autocast."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device)
    x = torch.randn(2, 4).to(device)

    def call():
        run = compiled(model)
        results = [run(x)]
        with torch.no_grad():
            results.append(run(x))
        with torch.inference_mode():
            results.append(run(x))
        with torch.autocast(device, torch.bfloat16):
            results.append(run(x))
        return [parts(result) for result in results]

    one, two, first, second = kept.twice(call)
    assert first["stored"] == second["loaded"] >= 3  # no gradient and inference mode are one capture
    assert "stored" not in second
    assert one == two
    assert one[3][0] == torch.bfloat16


def _guarded(x, mask=None, scale=1.0, shift=0, negates=False):
    x = x if mask is None else x * mask
    return (-x if negates else x) * scale + shift


# Arguments that Dynamo puts into the graph as constants: each is another capture.
GUARDED = [(), (ROWS * 2,), (None, 1.0, 3), (None, 1.0, 4), (None, 1.0, 3, True)]


@pytest.mark.slow
def test_arguments_that_are_no_tensors(kept):
    for expected in (STORED, LOADED):
        for arguments in GUARDED:
            kept.new_process()
            with counted() as found:
                result = compiled(_guarded)(ROWS, *arguments)
            assert found == expected
            torch.testing.assert_close(result, _guarded(ROWS, *arguments))


def test_pieces_of_a_divided_capture(kept):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]).to("xla")

    def call():
        model.zero_grad()
        result = compiled(model, blocks="on")(ROWS.to("xla"))
        result.sum().backward()
        return [parts(value) for value in (result, *(p.grad for p in model.parameters()))]

    one, two, first, second = kept.twice(call)
    assert first["stored"] == second["loaded"] >= 1
    assert "stored" not in second
    assert one == two


@dataclass(frozen=True)
class DoesNothing:
    name: ClassVar[str] = "does_nothing"

    def __call__(self, gm):
        return PassReport(self.name, 0)


def _closed_over(x):
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0])


REFUSED = {
    "its results share memory": (lambda x: (x.t(), x + 1), {}),
    "a program reads a constant tensor": (_closed_over, {}),
    "a part of the graph runs on the CPU": (lambda x: torch.linalg.eigvals(x @ x.T), {}),
    "the option donate": (lambda x: x + 1, {"donate": "mutated"}),
    "the option lowering": (lambda x: x + 1, {"lowering": "stock"}),
    "passes of the user's own": (lambda x: x + 1, {"extra_passes": [DoesNothing()]}),
    "it has no key": (lambda x: x + 1, {"ledger": True}),
}


@pytest.mark.quick("its results share memory", "a program reads a constant tensor", "the option donate")
@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_stored(kept, reason):
    function, options = REFUSED[reason]
    one, two, first, second = kept.twice(lambda: compiled(function, **options)(ROWS))
    assert first["not_stored"] == second["not_stored"] == {reason: 1}
    assert not kept.entries()
    torch.testing.assert_close(one, function(ROWS))
    torch.testing.assert_close(two, function(ROWS))


def test_a_dump_needs_the_passes(kept, tmp_path):
    options = {"dump_dir": str(tmp_path / "dump")}
    _, _, first, second = kept.twice(lambda: compiled(lambda x: x + 1, **options)(ROWS))
    assert first == second == {"not_stored": {"the option dump_dir": 1}}


@pytest.mark.slow
def test_explain_shows_the_passes_of_a_capture_that_is_stored(kept):
    model = nn.Linear(4, 4)
    compiled(model)(ROWS)
    kept.new_process()
    with counted() as found:
        report = kp_dynamo.explain(model, ROWS)
    assert not found
    assert len(kept.entries()) == 1
    assert not report.captures[0].is_hit
    assert " passes 0." in str(report)


def test_a_kernel_that_somebody_registered(kept):
    library = torch.library.Library("aten", "IMPL")
    library.impl("erfinv", lambda x: x * 0, "CompositeExplicitAutograd")
    kept.new_process()
    try:
        with counted() as found:
            compiled(lambda x: x + 1)(ROWS)
    finally:
        library._destroy()
    assert found == {"not_stored": {"kernels or decompositions that were registered for torch's operators": 1}}


@torch._dynamo.config.patch(inline_inbuilt_nn_modules=False)
def test_a_module_that_dynamo_only_names(kept):
    for activation in (nn.ReLU(), nn.Sigmoid()):
        kept.new_process()
        with counted() as found:
            result = compiled(nn.Sequential(activation))(ROWS)
        assert torch.allclose(result, activation(ROWS))
        assert found == {"not_stored": {"it has no key": 1}}


def test_a_convolution_has_a_key(kept):
    """Dynamo's graph has F.max_pool2d, a function that is made by another one."""
    one, two, first, second = kept.twice(lambda: compiled(lambda x: F.max_pool2d(x, 2))(IMAGES))
    assert (first, second) == (STORED, LOADED)
    torch.testing.assert_close(one, two)


def test_a_program_of_which_torch_xla_makes_no_module(kept, monkeypatch):
    def fail(portable):
        raise RuntimeError("no module")

    monkeypatch.setattr(program, "portable_trace", fail)
    one, two, first, second = kept.twice(lambda: compiled(lambda x: x * 5 - 1)(ROWS))
    assert first == second
    assert first["not_stored"] == {"torch_xla made no module of a program": 1}
    torch.testing.assert_close(one, ROWS * 5 - 1)
    torch.testing.assert_close(two, ROWS * 5 - 1)


def test_a_capture_that_cannot_be_described(kept, monkeypatch):
    monkeypatch.setattr(capture_record, "interface_of", lambda found: found.unknown)
    one, _, first, second = kept.twice(lambda: compiled(lambda x: x * 5 - 1)(ROWS))
    assert first["not_stored"] == second["not_stored"] == {"AttributeError while it was described": 1}
    torch.testing.assert_close(one, ROWS * 5 - 1)


def test_metadata_of_aotautograd_that_is_unknown(kept, monkeypatch):
    """A field with an unusual value, as a later version of torch may have."""
    stock = schemas.ViewAndMutationMeta.__post_init__

    def more(self):
        stock(self)
        self.unknown = len(self.subclass_inp_meta)

    monkeypatch.setattr(schemas.ViewAndMutationMeta, "__post_init__", more)
    _, _, first, second = kept.twice(lambda: compiled(lambda x: x * 5 - 1)(ROWS))
    assert first["not_stored"] == second["not_stored"] == {"AOTAutograd's unknown is 1": 1}


def test_the_layout_of_gradients_that_aotautograd_guesses(kept):
    """Sizes and strides have the types that AOTAutograd compares; otherwise each gradient is copied, or refused."""
    model, x, gradient = nn.BatchNorm2d(3), torch.randn(4, 3, 2, 2), torch.randn(4, 3, 2, 2, requires_grad=True)

    def gradients():
        found = torch.autograd.grad(compiled(model)(x), list(model.parameters()), gradient, create_graph=True)
        return [parts(value) for value in found]

    with torch._functorch.config.patch(guess_tangent_strides_as_outputs=True):
        first, second, stored, loaded = kept.twice(gradients)
    assert (stored, loaded) == (STORED, LOADED)
    assert first == second


def test_a_key_that_cannot_be_made(kept, monkeypatch):
    """The capture is compiled, whatever the reason."""

    def fail():
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(stored_captures, "torch_functions", fail)
    first, _, stored, _ = kept.twice(lambda: compiled(lambda x: x * 5 - 1)(ROWS))
    torch.testing.assert_close(first, ROWS * 5 - 1)
    assert stored == {"not_stored": {"its key cannot be made (RuntimeError)": 1}}


def test_a_folder_that_is_not_kept_within_its_bound(kept, monkeypatch):
    """The capture was written."""

    def fail(folder, max_bytes, written):
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(eviction, "evict", fail)
    assert kept.twice(lambda: compiled(lambda x: x * 5 - 1)(ROWS))[2:] == (STORED, LOADED)


def test_the_fields_that_are_not_compared_exist():
    fields = {field.name for field in dataclasses.fields(schemas.ViewAndMutationMeta)} | {"output_types"}
    assert set(interface._NOT_COMPARED) <= fields


@pytest.mark.quick("cpu")
def test_an_evicted_program_is_compiled_again(kept, device):
    """From its module, while the compiled function is in use."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device)
    x = ROWS.to(device)
    compiled(model)(x).sum().backward()
    kept.new_process()
    run = compiled(model)
    with counted() as found:
        before = run(x)
        kp_dynamo.clear_cache()
        model.zero_grad()
        after = run(x)
        after.sum().backward()
    assert found == LOADED
    assert parts(before) == parts(after)
    gradients = [parts(p.grad) for p in model.parameters()]
    model.zero_grad()
    run(x).sum().backward()
    assert [parts(p.grad) for p in model.parameters()] == gradients
