"""Models of the zoo at lengths of all kinds, their padding full of NaN, in inference and in training."""

from __future__ import annotations

import pytest
import torch

from kp_dynamo import clear_cache, mark_sequence
from kp_dynamo.telemetry import snapshot
from tests.spine import compiled, counted
from tests.zoo.models import BY_NAME

# Dynamo 2.9 instantiates the autograd function in which the masks of transformers index.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
LENGTHS = (21, 5, 9, 30, 16, 33)
BUCKETS = [16, 32, 64]
# What is refused, and why.
REFUSED: dict[str, str] = {}


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    monkeypatch.setenv("KP_TPU_POISON", "1")
    torch._dynamo.reset()
    clear_cache()  # programs are counted, and an earlier test's may be the same


def at_length(inputs, length, *, with_mask):
    """Text inputs repeated and cut to a length; without masks all tokens count."""
    texts = {name: t for name, t in inputs.items() if t.dtype == torch.int64 and (with_mask or "mask" not in name)}
    cut = {name: mark_sequence(t.repeat(1, 6)[:, :length].contiguous(), 1) for name, t in texts.items()}
    return {**{name: t for name, t in inputs.items() if t.dtype != torch.int64}, **cut}


def outcome(run, model, arguments, *, trains):
    model.zero_grad()
    with torch.set_grad_enabled(trains):
        results = run(**arguments)
    result = results[0]
    if not trains:
        return result.flatten()
    (result * torch.linspace(-1, 1, result.numel()).reshape(result.shape)).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat([result.detach().flatten(), *gradients])


def check(name, *, trains, with_mask=True, lengths=LENGTHS):
    model, inputs = BY_NAME[name].make()
    model.train(trains)
    run, before = compiled(model, buckets=BUCKETS), snapshot()["bucket_refusals"]
    with counted() as counts:
        for length in lengths:
            arguments = at_length(inputs, length, with_mask=with_mask)
            expected = outcome(model, model, arguments, trains=trains)
            found = outcome(run, model, arguments, trains=trains)
            assert (found - expected).norm() <= 1e-5 * expected.norm(), length
    is_refused = snapshot()["bucket_refusals"] > before
    assert is_refused == (name in REFUSED)
    if not is_refused:
        used = {next(size for size in BUCKETS if size >= length) for length in lengths}
        assert counts.programs == len(used) * (2 if trains else 1)


@pytest.mark.slow
def test_a_llama_at_two_lengths():
    model, inputs = BY_NAME["llama"].make()
    run = compiled(model.eval(), buckets=[16])
    with counted() as counts, torch.no_grad():
        for length in (9, 5):
            arguments = at_length(inputs, length, with_mask=True)
            expected = model(**arguments)[0]
            assert (run(**arguments)[0] - expected).norm() <= 1e-5 * expected.norm()
    assert counts.programs == 1


@pytest.mark.slow
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gpt2", "bert", "roberta", "gemma2"])
def test_at_every_length(name, trains):
    check(name, trains=trains)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert", "roberta"])
def test_without_a_mask(name):
    check(name, trains=True, with_mask=False, lengths=(9, 21, 13))


@pytest.mark.slow
@pytest.mark.parametrize("trains", [False, True])
def test_an_encoder_and_a_decoder_of_other_lengths(trains):
    check("t5", trains=trains)
