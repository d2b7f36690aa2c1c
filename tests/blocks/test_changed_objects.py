"""`compile_blocks` where the forward of children changes Python objects: all calls change them, as in eager."""

import collections
import copy

import pytest
import torch
from torch import nn

from kp_dynamo import compile_blocks
from tests.spine import counted

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch hides it

FLOAT32 = {"precision": "float32"}


class Shared:
    """What all layers hold."""

    def __init__(self):
        self.count, self.value, self.items = 0, None, []
        self.found, self.named, self.recent = collections.defaultdict(list), {}, collections.deque(maxlen=4)
        self.numbers = set()


def reassign_buffer(layer, x, given):
    layer.total = layer.total + x.detach().sum(0)


def count_calls(layer, x, given):
    layer.calls += 1


def append_to_list(layer, x, given):
    layer.shared.items.append(x.detach().sum())


def append_to_deque(layer, x, given):
    layer.shared.recent.append(x.detach().sum())


def add_to_set(layer, x, given):
    layer.shared.numbers.add(len(layer.shared.numbers))


def append_in_defaultdict(layer, x, given):
    layer.shared.found["a"].append(x.detach().sum())


def count_in_dict(layer, x, given):
    layer.shared.named["calls"] = layer.shared.named.get("calls", 0) + 1


def replace_in_dict(layer, x, given):
    layer.shared.named["last"] = x.detach()


def count_in_object(layer, x, given):
    layer.shared.count += 1


def replace_in_object(layer, x, given):
    layer.shared.value = x.detach().sum()


def append_to_argument(layer, x, given):
    given.append(x)


def replace_in_argument(layer, x, given):
    given[0] = x


def append_to_new_list(layer, x, given):
    layer.made.append(x)


CHANGES = (
    reassign_buffer, count_calls, append_to_list, append_to_deque, add_to_set, append_in_defaultdict, count_in_dict,
    replace_in_dict, count_in_object, replace_in_object, append_to_argument, replace_in_argument, append_to_new_list,
)  # fmt: skip


class Layer(nn.Module):
    def __init__(self, change, shared):
        super().__init__()
        self.change, self.shared, self.calls, self.made = change, shared, 0, None
        self.linear = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x, given=None):
        if self.change is not None:
            self.change(self, x, given)
        return self.linear(x)


class Model(nn.Module):
    """Calls each of its layers twice, after a change of its own or not."""

    def __init__(self, change, *, changes_first=False):
        super().__init__()
        self.shared, self.changes_first = Shared(), changes_first
        self.gives_list = change is append_to_new_list
        self.takes_list = change in (append_to_argument, replace_in_argument)
        self.layers = nn.ModuleList(Layer(change, self.shared) for _ in range(3))

    def forward(self, x):
        given = [x]
        for layer in self.layers if self.gives_list else ():
            layer.made = given
        if self.changes_first:
            self.shared.items.append(x.detach().sum())
            self.shared.named["first"] = x.detach()
            self.shared.count += 1
        for layer in (*self.layers, *self.layers):
            x = layer(x, given) if self.takes_list else layer(x)
        return x + sum(given), len(given), len(self.shared.items), self.shared.count

    def state(self):
        """Everything that a call may change."""
        return vars(self.shared), [(layer.calls, layer.total) for layer in self.layers]


def assert_equal_calls(mine, eager, inputs):
    for x in inputs:
        torch.testing.assert_close(mine(x), eager(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(_lists(mine.state()), _lists(eager.state()), rtol=1e-4, atol=1e-5)


def _lists(value):
    """With lists and dicts in place of deques and sets, which assert_close does not compare."""
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    if isinstance(value, (tuple, list, set, collections.deque)):
        return [_lists(item) for item in value]
    return 0 if value is None else value


@pytest.mark.quick(
    "reassign_buffer-True", "count_calls-True", "append_to_deque-True", "add_to_set-True", "append_in_defaultdict-True",
    "replace_in_dict-True", "count_in_object-True", "append_to_argument-True",
)  # fmt: skip
@pytest.mark.parametrize("changes_first", [False, True])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_call_changes_objects(change, changes_first):
    eager = Model(change, changes_first=changes_first)
    mine = compile_blocks(copy.deepcopy(eager), options=FLOAT32)
    assert_equal_calls(mine, eager, [torch.randn(2, 4) for _ in range(3)])


@pytest.mark.quick("True-append_to_list", "False-count_in_object", "False-reassign_buffer")
@pytest.mark.parametrize("change", [append_to_list, count_in_object, reassign_buffer], ids=lambda c: c.__name__)
@pytest.mark.parametrize("is_first_call", [True, False])
def test_a_child_that_changes_objects_unlike_the_others_raises(change, is_first_call):
    mine = compile_blocks(Model(None), options=FLOAT32)
    if not is_first_call:
        mine(torch.randn(2, 4))
    mine.layers[2].change = change
    with pytest.raises(Exception, match=r"layers.0 to layers.2 changes Python objects, and the call that"):
        mine(torch.randn(2, 4))
    mine.layers[2].change = None
    eager = copy.deepcopy(mine)
    assert_equal_calls(mine, eager, [torch.randn(2, 4)])


class Told(nn.Module):
    """A layer that reads what its model left in it."""

    def __init__(self, shared):
        super().__init__()
        self.linear, self.shared, self.named, self.given = nn.Linear(4, 4), shared, {"scale": 1.0}, None

    def forward(self, x):
        x = torch.nn.functional.dropout(torch.tanh(self.linear(x)), 0.5, self.training) * self.named["scale"]
        return x if self.given is None else x + self.given + (0 if self.shared.value is None else self.shared.value)


class Telling(nn.Module):
    def __init__(self, tell):
        super().__init__()
        self.tell, self.calls, shared = tell, 0, Shared()
        self.layers = nn.ModuleList(Told(shared) for _ in range(3))

    def forward(self, x):
        self.calls += 1
        for number, layer in enumerate(self.layers):
            self.tell(layer, x, number)
            x = layer(x)
        return x


def tell_mode(layer, x, number):
    layer.train(False)


def tell_tensor(layer, x, number):
    layer.given = x * number


def tell_through_dict(layer, x, number):
    layer.named["scale"] = number + 0.5


def tell_through_object(layer, x, number):
    layer.given, layer.shared.value = x, x.sum() * number


@pytest.mark.quick("tell_mode", "tell_tensor", "tell_through_object")
@pytest.mark.parametrize("tell", [tell_mode, tell_tensor, tell_through_dict, tell_through_object])
def test_a_child_reads_what_the_model_changed_before_the_call(tell):
    eager = Telling(tell).train(tell is tell_mode)
    mine = compile_blocks(copy.deepcopy(eager), options=FLOAT32)
    for _ in range(2):
        x = torch.randn(2, 4)
        torch.testing.assert_close(mine(x), eager(x), rtol=1e-4, atol=1e-5)
        for model in (mine, eager):
            model.train(tell is tell_mode)


SETTING, TOLD, NUMBER = Shared(), {"scale": 1.0}, 0.0


class Reading(nn.Module):
    """A layer that reads what no layer holds."""

    common = {"scale": 1.0}  # noqa: RUF012 - all share it

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        scale = SETTING.count + TOLD["scale"] + NUMBER + self.common["scale"]
        return torch.tanh(self.linear(x)) * scale


def closed_over():
    cell = {"scale": 1.0}

    class Closed(Reading):
        def forward(self, x):
            return super().forward(x) * cell["scale"]

    def change(number):
        cell["scale"] = number

    return Closed, change


def count(number):
    SETTING.count = number


def name(number):
    TOLD["scale"] = number


def assign(number):
    global NUMBER
    NUMBER = float(number)


def share(number):
    Reading.common["scale"] = number


class Announcing(nn.Module):
    def __init__(self, layer, change):
        super().__init__()
        self.layers, self.change = nn.ModuleList(layer() for _ in range(3)), change

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            self.change(number)
            x = layer(x)
        return x


@pytest.mark.quick("assign", "closed_over")
@pytest.mark.parametrize("change", [count, name, assign, share, closed_over])
def test_a_child_reads_globals_that_the_model_changed_before_the_call(change):
    layer, change = closed_over() if change is closed_over else (Reading, change)
    eager = Announcing(layer, change)
    mine = Announcing(layer, change)
    mine.load_state_dict(eager.state_dict())
    compile_blocks(mine, options=FLOAT32)
    for _ in range(2):
        x = torch.randn(2, 4)
        change(7)
        found = mine(x)
        change(7)
        torch.testing.assert_close(found, eager(x), rtol=1e-4, atol=1e-5)


def test_changes_of_other_objects_do_not_make_dynamo_follow_the_children():
    model = compile_blocks(Telling(lambda *_: None).eval(), options=FLOAT32)
    with counted() as count, torch.no_grad():
        model(torch.randn(2, 4))
    assert count["aot_traces"] == 1  # the layer
