"""Log calls inside a forward: no graph break, the same messages at every call as in eager, other backends untouched."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from kp_dynamo import explain
from tests.spine import compiled

logger = logging.getLogger("a model's logger")


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        print("call", self.calls, "of", x.shape[0], "rows", sep="|")
        return x.sin()


def printed(x: Tensor) -> Tensor:
    print("before", x.shape, f"{x.shape[0]} rows of {tuple(x.shape)}")
    y = x.sin()
    print()
    return y.cos()


def logged(x: Tensor) -> Tensor:
    logger.info("plain")
    logger.warning("%s of %d", "seven", 7)
    logger.log(logging.ERROR, f"{x.dtype} {len(x)}")
    logging.warning("the root's")
    return x.sin()


def warned(x: Tensor) -> Tensor:
    warnings.warn("old", FutureWarning, stacklevel=2)
    warnings.warn("plain")
    return x.sin()


def a_list_that_changes(x: Tensor) -> Tensor:
    seen = ["first"]
    print(seen)
    y = x.sin()
    seen.append("second")
    print(seen)
    return y


def in_a_loop(x: Tensor) -> Tensor:
    for number in range(3):
        x = x.sin()
        print("layer", number)
    return x


def in_a_branch(x: Tensor) -> Tensor:
    if x.shape[0] > 3:
        print("many")
    return x.sin()


def nested(x: Tensor) -> Tensor:
    return printed(logged(x)) + in_a_loop(x)


@pytest.fixture
def messages(capsys, caplog, recwarn):
    caplog.set_level(logging.INFO)

    def read():
        records = [(r.name, r.levelname, r.getMessage()) for r in caplog.records if not r.name.startswith("kp_dynamo")]
        seen = capsys.readouterr().out, records, [(w.category, str(w.message)) for w in recwarn.list]
        caplog.clear()
        recwarn.clear()
        return seen

    return read


@pytest.mark.parametrize(
    "fn", [Counted(), printed, logged, a_list_that_changes, in_a_loop, in_a_branch, nested], ids=lambda f: str(f)[:20]
)
def test_messages_are_those_of_eager_at_every_call(fn, messages):
    make = (lambda: Counted()) if isinstance(fn, Counted) else (lambda: fn)
    eager, run = make(), compiled(make(), fullgraph=True)
    for rows in (2, 2, 3, 5, 5):
        x = torch.randn(rows, 2)
        expected = eager(x), messages()
        found = run(x), messages()
        torch.testing.assert_close(found[0], expected[0])
        assert found[1] == expected[1]


def test_warnings_keep_their_category(messages):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        run, x = compiled(warned, fullgraph=True), torch.randn(2)
        for _ in range(2):
            run(x)
            _, _, seen = messages()
            assert [s for s in seen if s[1] in ("old", "plain")] == [(FutureWarning, "old"), (UserWarning, "plain")]


def a_tensor(x: Tensor) -> Tensor:
    y = x.sin()
    print(y)
    return y.add_(1)


def with_exc_info(x: Tensor) -> Tensor:
    logger.warning("now", exc_info=True)
    return x.sin()


def asks(x: Tensor) -> Tensor:
    return x.sin() if logger.isEnabledFor(logging.CRITICAL) else x.cos()


@pytest.mark.parametrize("fn", [a_tensor, with_exc_info, asks])
def test_what_breaks_the_graph_still_does(fn, messages):
    x = torch.randn(3)
    expected = fn(x), messages()
    found = compiled(fn)(x), messages()
    torch.testing.assert_close(found[0], expected[0])
    assert found[1] == expected[1]


class Loud(logging.Logger):
    def info(self, *args, **kwargs):
        self.count = getattr(self, "count", 0) + 1


loud = Loud("loud")


def through_a_subclass(x: Tensor) -> Tensor:
    loud.info("counted")
    return x.sin()


def test_a_method_of_a_subclass_is_left_to_dynamo():
    run = compiled(through_a_subclass)
    for number in (1, 2):
        run(torch.randn(3))
        assert loud.count == number


def test_other_backends_are_as_before():
    counters.clear()
    torch.compile(printed, backend="eager")(torch.randn(3))
    assert sum(counters["graph_break"].values()) > 0


def test_explain_finds_no_break():
    assert not explain(printed, torch.randn(3)).graph_breaks


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_transformers_warnings_do_not_split_a_model_from_its_loss():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=32))
    ids = torch.randint(0, 32, (2, 8))
    explanation = explain(lambda ids: model(ids, labels=ids, use_cache=False).loss, ids)
    assert not explanation.graph_breaks
    assert len(explanation.captures) == 1
