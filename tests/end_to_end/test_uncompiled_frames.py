"""What Dynamo gives up is a warning once, an error under `strict`, and the first line of `explain`."""

import logging

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from kp_dynamo import XLACompilationError, explain
from kp_dynamo.telemetry import snapshot, warn_once
from kp_dynamo.uncompiled_frames import python_name
from tests.spine import compiled, run_script

OURS = "kp_dynamo.uncompiled_frames"


@pytest.fixture(autouse=True)
def _nothing_logged():
    warn_once._logged.clear()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == OURS and r.levelno == logging.WARNING]


def given_up(x: torch.Tensor) -> torch.Tensor:
    """A break in a try block: Dynamo cannot resume there, and gives the whole function up."""
    try:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()
    finally:
        x.tan()


def skipped(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = x.sin()
        torch._dynamo.graph_break()
    return x.cos()


def calls_skipped(x: torch.Tensor) -> torch.Tensor:
    x = skipped(x)
    return x.exp()


def breaking(x: torch.Tensor) -> torch.Tensor:
    x = x.sin()
    torch._dynamo.graph_break()
    return x.cos()


def test_a_frame_that_is_given_up_is_one_warning_with_its_reason(caplog) -> None:
    run, before = compiled(given_up), snapshot()["uncompiled_frames"]
    for length in (3, 4, 5):
        x = torch.randn(length)
        torch.testing.assert_close(run(x), given_up(x))
    (text,) = warnings_of(caplog)
    assert f"given_up ({__file__}:" in text
    assert "graph_break" in text
    assert "Try: " in text
    assert snapshot()["uncompiled_frames"] > before


def test_under_strict_it_is_an_error_and_the_next_compilation_works() -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"strict=True.*given_up") as caught:
        compiled(given_up, strict=True)(torch.randn(3))
    assert isinstance(caught.value.inner_exception, XLACompilationError)
    torch.testing.assert_close(compiled(torch.sin, strict=True)(torch.ones(3)), torch.ones(3).sin())
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="given_up"):
        compiled(given_up, strict=True)(torch.randn(3))


def test_a_frame_that_is_skipped_is_a_warning_when_the_next_frame_comes(caplog) -> None:
    compiled(calls_skipped)(torch.randn(3))
    assert any("skipped (" in text for text in warnings_of(caplog))


def test_explain_begins_with_what_is_not_compiled(caplog) -> None:
    for function in (given_up, skipped):
        found = explain(function, torch.randn(3))
        assert found.uncompiled
        assert str(found).startswith("NOT COMPILED, runs eagerly: 1")
    assert not warnings_of(caplog)
    found = explain(breaking, torch.randn(3))
    assert not found.uncompiled
    assert len(found.graph_breaks) == 1


def test_a_graph_break_is_no_frame_that_is_given_up(caplog) -> None:
    compiled(breaking, strict=True)(torch.randn(3))
    assert not warnings_of(caplog)


def test_the_step_of_an_optimizer_is_no_frame_that_is_given_up(caplog) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    step = torch.compile(lambda: optimizer.step(), backend="kp_tpu", options={"strict": True})
    with torch.no_grad():
        step()
        torch.compile(lambda x: x + 1, backend="kp_tpu")(torch.ones(2))
    assert "gave up" not in caplog.text


def test_other_backends_are_not_reported(caplog) -> None:
    compiled(torch.sin)(torch.ones(3))
    torch.compile(given_up, backend="eager")(torch.ones(3))
    assert not warnings_of(caplog)


def test_a_reset_of_dynamo_does_not_silence_it(caplog) -> None:
    compiled(torch.sin)(torch.ones(3))
    torch._dynamo.reset()
    compiled(given_up)(torch.ones(3))
    assert len(warnings_of(caplog)) == 1


def grown(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return cache.sum() + x


def named(x: torch.Tensor, mode: str) -> torch.Tensor:
    return x.sin() if mode == "0" else x.cos()


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (named, lambda i: (torch.ones(3), str(i)), ["mode differs", "Try: keep mode the same"]),
        (grown, lambda i: (torch.ones(i + 2), torch.ones(3)), ["cache grows", "StaticCache"]),
        (lambda x: x.sin(), lambda i: (torch.ones(3, i + 2),), ["dimension 1 of x", "mark_sequence(x, 1)", "buckets"]),
    ],
)
def test_the_recompile_limit_names_the_argument_and_the_remedy(function, arguments, words, caplog) -> None:
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        run = compiled(function)
        for i in range(11):
            run(*arguments(i))
        (text,) = warnings_of(caplog)
        assert all(word in text for word in words), text
        torch._dynamo.reset()
        strict = compiled(function, strict=True)
        for i in range(8):
            strict(*arguments(i))
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="strict=True"):
            strict(*arguments(8))


def test_the_limit_of_another_backend_is_torchs_own_warning(caplog) -> None:
    run = torch.compile(named, backend="eager")
    for i in range(11):
        run(torch.ones(3), str(i))
    assert not warnings_of(caplog)
    assert any("hit config.recompile_limit" in r.getMessage() for r in caplog.records)


def test_a_packed_sequence_is_named(caplog) -> None:
    """The frame that calls the layer runs eagerly."""
    stack, x = nn.LSTM(3, 4), torch.randn(5, 2, 3)
    given = pack_padded_sequence(x, torch.tensor([5, 3]))

    def run(given: PackedSequence) -> torch.Tensor:
        return stack(given)[0].data.sin()

    with torch.no_grad():
        torch.testing.assert_close(compiled(run)(given), run(given), rtol=1e-5, atol=1e-6)
        assert any("PackedSequence" in text for text in warnings_of(caplog))
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="PackedSequence"):
            compiled(run, strict=True)(given)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.RNN])
def test_a_sequence_is_packed_and_padded_within(kind: type) -> None:
    """Dynamo could not trace what unpacks it."""
    layer, x, lengths = kind(5, 6, batch_first=True), torch.randn(3, 5, 5), torch.tensor([5, 3, 1])

    def run(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x.sin(), lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(layer(packed)[0], batch_first=True)[0].cos()

    found, wanted = compiled(run)(x, lengths), run(x, lengths)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), list(layer.parameters())),
        torch.autograd.grad(wanted.sum(), list(layer.parameters())),
    )


def test_names_are_those_of_python() -> None:
    assert python_name("L['self']._modules['layers']._modules['0']._parameters['weight']") == "self.layers.0.weight"
    assert python_name("L['past'][0]") == "past[0]"


UNUSED = """
import logging, sys
import torch, kp_dynamo
logging.basicConfig(stream=sys.stdout)
model = torch.nn.Linear(3, 3)
model.generate = lambda x: model(x)
run = torch.compile(model, backend={backend})
{call}
"""


@pytest.mark.parametrize(
    ("backend", "call", "is_said"),
    [
        ("'kp_tpu'", "run.generate(torch.ones(3))", True),
        pytest.param("kp_dynamo.kp_tpu", "run.generate(torch.ones(3))", True, marks=pytest.mark.slow),
        pytest.param("kp_dynamo.kp_tpu", "run(torch.ones(3))", False, marks=pytest.mark.slow),
        pytest.param("[kp_dynamo.kp_tpu, 'eager'][1]", "run(torch.ones(3))", False, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_compiled_nothing_says_so_at_exit(backend: str, call: str, is_said: bool) -> None:
    found = run_script(UNUSED.format(backend=backend, call=call))
    assert ("nothing was compiled with it" in found) == is_said
