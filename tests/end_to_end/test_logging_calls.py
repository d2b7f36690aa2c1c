"""Log calls inside a forward: no graph break, the same messages at every call as in eager, other backends untouched."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from kp_dynamo import compile_blocks, explain
from kp_dynamo.compat import logging_calls
from tests.spine import compiled

logger = logging.getLogger("a model's logger")
logger.propagate = False
stream = io.StringIO()
handler = logging.StreamHandler(stream)
handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))


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
def pytests_handlers(monkeypatch):
    """pytest adds its handlers to every logger."""
    monkeypatch.setattr(logging_calls, "_STANDARD", (*logging_calls._STANDARD, "_pytest.logging"))


@pytest.fixture
def messages(capsys, caplog, recwarn):
    caplog.set_level(logging.INFO)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)

    def read():
        ours = ("kp_dynamo", "torch")
        records = [(r.name, r.levelname, r.getMessage()) for r in caplog.records if not r.name.startswith(ours)]
        shown = [(w.category, str(w.message)) for w in recwarn.list if "instantiated" not in str(w.message)]
        seen = capsys.readouterr().out, stream.getvalue(), records, shown
        caplog.clear()
        recwarn.clear()
        stream.seek(0)
        stream.truncate()
        return seen

    yield read
    logger.removeHandler(handler)


def compare(eager, run, messages, sizes=(2, 2, 3, 5, 5)):
    """Results, messages and the model's attributes after every call."""
    for rows in sizes:
        x = torch.randn(rows, 2)
        expected = eager(x), messages()
        found = run(x), messages()
        torch.testing.assert_close(found[0], expected[0])
        assert found[1] == expected[1]


@pytest.mark.parametrize("fn", [printed, logged, in_a_loop, in_a_branch, nested], ids=lambda f: f.__name__)
@pytest.mark.usefixtures("pytests_handlers")
def test_messages_are_those_of_eager_at_every_call(fn, messages):
    compare(fn, compiled(fn, fullgraph=True), messages)


def test_warnings_keep_their_category(messages):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        run, x = compiled(warned, fullgraph=True), torch.randn(2)
        for _ in range(2):
            run(x)
            assert messages()[-1] == [(FutureWarning, "old"), (UserWarning, "plain")]


def a_tensor(x: Tensor) -> Tensor:
    y = x.sin()
    print(y)
    return y.add_(1)


def with_exc_info(x: Tensor) -> Tensor:
    logger.warning("now", exc_info=True)
    return x.sin()


def asks(x: Tensor) -> Tensor:
    return x.sin() if logger.isEnabledFor(logging.CRITICAL) else x.cos()


def in_a_try(x: Tensor) -> Tensor:
    try:
        print(1, foo=2)
    except TypeError:
        return x - 1
    return x + 1


def recorded(x: Tensor) -> Tensor:
    with warnings.catch_warnings(record=True) as seen:
        warnings.warn("recorded")
    return x + len(seen)


def an_error_that_decides(x: Tensor) -> Tensor:
    with warnings.catch_warnings(action="error"):
        try:
            warnings.warn("raised")
        except UserWarning:
            return x - 1
    return x + 1


def hidden(x: Tensor) -> Tensor:
    with warnings.catch_warnings(action="ignore"):
        warnings.warn("hidden")
    return x + 1


def containers(x: Tensor) -> Tensor:
    print(OrderedDict(a=1), {"b": 2}, [3], {4})
    return x.sin()


def of_the_root(x: Tensor) -> Tensor:
    logging.warning("a handler of its own")
    return x.sin()


@pytest.mark.parametrize(
    "fn",
    [
        a_tensor, with_exc_info, asks, Counted(), a_list_that_changes, in_a_try, recorded, an_error_that_decides,
        hidden, containers, of_the_root,
    ],
    ids=lambda f: getattr(f, "__name__", "Counted"),
)  # fmt: skip
def test_what_could_be_seen_is_not_moved(fn, messages):
    compare(fn, compiled(copy.deepcopy(fn)), messages)


@pytest.mark.filterwarnings("error:bad")
def test_a_warning_that_is_an_error_leaves_the_state_of_eager():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.b.add_(1)
            warnings.warn("bad")
            self.b.add_(10)
            return x + self.b

    for model in (Writes(), compiled(Writes())):
        with pytest.raises(UserWarning, match="bad"):
            model(torch.randn(2))
        assert model.b.item() == 1


def test_children_of_compile_blocks_log_once(messages):
    class Layer(nn.Module):
        def __init__(self, number: int):
            super().__init__()
            self.linear, self.number = nn.Linear(2, 2), number

        def forward(self, x: Tensor) -> Tensor:
            print("layer", self.number)
            return x + self.linear(x)

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer(number) for number in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model = Layers()
    compare(model, compile_blocks(copy.deepcopy(model), options={"precision": "float32"}), messages)


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
@pytest.mark.usefixtures("pytests_handlers")
def test_transformers_warnings_do_not_split_a_model_from_its_loss():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=32))
    ids = torch.randint(0, 32, (2, 8))
    explanation = explain(lambda ids: model(ids, labels=ids, use_cache=False).loss, ids)
    assert not explanation.graph_breaks
    assert len(explanation.captures) == 1
