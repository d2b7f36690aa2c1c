"""A causal mask that all layers read is built in the layer, where the passes see what it is."""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kp_dynamo.aot.trace_programs import graph_texts
from kp_dynamo.blocks.constant_values import computed, independent
from kp_dynamo.compat import xla
from kp_dynamo.config.options import CompileOptions
from tests.blocks.dividing import divide

LENGTH = 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, mask):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        if mask.dtype is torch.bool:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            y = torch.softmax(q @ k.transpose(-1, -2) / 2 + mask, -1) @ v
        return x + self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, make_mask):
        super().__init__()
        self.make_mask, self.embed = make_mask, nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        mask, x = self.make_mask(x), self.embed(x)
        for layer in self.layers:
            x = layer(x, mask)
        return x, mask.sum()


def from_positions(x):
    p = torch.arange(x.shape[1], device=x.device)
    return (p[None, :] <= p[:, None]).expand(x.shape[0], 1, -1, -1)


def by_vmap(x):
    def row(q, k):
        return k <= q

    p = torch.arange(x.shape[1], device=x.device)
    return torch.vmap(torch.vmap(row, (None, 0)), (0, None))(p, p)[None, None]


def of_sequences(x, sequence):
    """As transformers builds it: by vmap over the batch too, for sequences [B, S] that are packed into a row."""

    def kept(b, q, k):
        number_of = torch.ops.aten.index
        return (k <= q) & (number_of(sequence, [b, q]) == number_of(sequence, [b, k]))

    b, p = torch.arange(x.shape[0], device=x.device), torch.arange(x.shape[1], device=x.device)
    of_keys = torch.vmap(torch.vmap(kept, (None, None, 0)), (None, 0, None))
    return torch.vmap(of_keys, (0, None, None))(b, p, p)[:, None]


def one_sequence(x):
    return of_sequences(x, torch.zeros(x.shape[:2], dtype=torch.long, device=x.device))


def packed(x):
    row, position = torch.arange(x.shape[0], device=x.device), torch.arange(x.shape[1], device=x.device)
    return of_sequences(x, (position[None, :] >= 2 + row[:, None]).long())


def of_the_row(x):
    def kept(b, q, k):
        return (k <= q) | (b > 0)

    b, p = torch.arange(x.shape[0], device=x.device), torch.arange(x.shape[1], device=x.device)
    of_keys = torch.vmap(torch.vmap(kept, (None, None, 0)), (None, 0, None))
    return torch.vmap(of_keys, (0, None, None))(b, p, p)[:, None]


def inside_a_vmap_of_the_input(x):
    """The places of the inner vmap only select equal rows; the outer one is over an input."""
    table = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).tril()[-1:].expand(LENGTH, -1).clone()

    p = torch.arange(LENGTH, device=x.device)

    def of_row(_):
        return torch.vmap(lambda q: torch.ops.aten.index(table, [q]))(p)

    return torch.vmap(of_row)(x)[:, None]


def least_number(x):
    size = x.shape[1]
    return torch.full((size, size), torch.finfo(x.dtype).min, device=x.device).triu(1)[None, None]


def minus_infinity(x):
    return torch.zeros(x.shape[1], x.shape[1], device=x.device).masked_fill(~from_positions(x)[0, 0], -torch.inf)


def written(x):
    mask = torch.zeros(x.shape[1], x.shape[1], device=x.device)
    mask.masked_fill_(~from_positions(x)[0, 0], -torch.inf)
    return mask


def window(x):
    return from_positions(x) & from_positions(x).tril(3).triu(-2)


def written_by_an_input(x):
    mask = least_number(x).clone()
    mask[0, 0, 3, 1] = x[0, 0, 0]
    return mask


def of_the_input(x):
    return from_positions(x) & (x.sum(-1) < 1e6)[:, None, None, :]


def two_numbers(x):
    return least_number(x) + torch.full((LENGTH, LENGTH), -1e38, device=x.device).triu(2)


def minus_zero(x):
    return torch.full((LENGTH, LENGTH), 1e38, device=x.device).triu(1).neg()


def of_an_operator(x):
    return torch.ops.test_own_masks.mask(x.shape[1])[None, None]


@torch.library.custom_op("test_own_masks::mask", mutates_args=())
def mask(size: int) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


@mask.register_fake
def _(size):
    return torch.ones(size, size, dtype=torch.bool)


def first_key(x):
    return (torch.arange(x.shape[1], device=x.device) < 1).expand(x.shape[0], 1, x.shape[1], -1)


def drawn(x):
    return from_positions(x) & (torch.rand(LENGTH, LENGTH, device=x.device) < 2)


CAUSAL = (from_positions, by_vmap, one_sequence, least_number, minus_infinity)
OTHERS = (
    written,
    window,
    written_by_an_input,
    of_the_input,
    two_numbers,
    minus_zero,
    first_key,
    packed,
    of_the_row,
    of_an_operator,
    drawn,
)


def divided(model, x, **options):
    """Whether each layer builds its mask."""
    found = []

    def backend(gm, inputs):
        division = divide(gm, inputs)
        (layer,) = [piece for piece in division.pieces if piece.runs == 3]
        names = [getattr(node.target, "__name__", "") for node in layer.capture.gm.graph.nodes]
        found.append("tril" in names)
        return gm

    torch.compile(model, backend=backend, **options)(x)
    return found[0]


@pytest.mark.quick("from_positions-xla", "minus_infinity-xla")
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("make_mask", CAUSAL, ids=lambda f: f.__name__)
def test_each_layer_builds_a_causal_mask(make_mask, device):
    assert divided(Model(make_mask).to(device), torch.randn(2, LENGTH, 8, device=device))


def test_an_inner_vmap_is_not_taken_for_the_one_over_an_input():
    seen = []

    def backend(gm, inputs):
        seen.extend((node.meta.get("example_value"), value) for node, value in computed(independent(gm)).items())
        return gm

    torch.compile(inside_a_vmap_of_the_input, backend=backend)(torch.randn(4, LENGTH, 8))
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    plain = [(e, v) for e, v in seen if isinstance(v, torch.Tensor) and not is_wrapped(v)]
    assert plain
    assert [v.shape for _, v in plain] == [e.shape for e, _ in plain]


@pytest.mark.quick("one_sequence")
@pytest.mark.parametrize("make_mask", [from_positions, one_sequence, least_number], ids=lambda f: f.__name__)
def test_the_batch_does_not_count_in_the_size_of_a_mask(make_mask, monkeypatch):
    monkeypatch.setattr("kp_dynamo.blocks.own_masks._MAX_ELEMENTS", LENGTH * LENGTH)
    monkeypatch.setattr("kp_dynamo.blocks.constant_values._MAX_BYTES", 8 * LENGTH * LENGTH)
    monkeypatch.setattr("kp_dynamo.passes.attention.known_masks._MAX_ELEMENTS", LENGTH * LENGTH)
    x = torch.randn(3, LENGTH, 8)

    def batch_of(mask):
        return make_mask(mask).expand(3, 1, LENGTH, LENGTH)

    assert divided(Model(batch_of), x)
    xla.device()
    texts = graph_texts(Model(batch_of), (x,), CompileOptions(blocks="on"), True)["aten"]
    attention = [line for text in texts.values() for line in text.splitlines() if "kp.attention" in line]
    assert attention
    assert all(re.search(r"\[\], \[\], \(\), [\d.]+, True", line) for line in attention)


@pytest.mark.quick("written_by_an_input", "minus_zero", "of_an_operator", "drawn", "first_key", "packed", "of_the_row")
@pytest.mark.parametrize("make_mask", OTHERS, ids=lambda f: f.__name__)
def test_other_masks_are_read(make_mask):
    assert not divided(Model(make_mask), torch.randn(2, LENGTH, 8))


def test_masks_of_symbolic_sizes_are_read():
    assert not divided(Model(from_positions), torch.randn(2, LENGTH, 8), dynamic=True)


def test_a_level_of_vmap_is_closed_when_the_mask_cannot_be_computed():
    def of_numbers(x):
        def row(q, k):
            return (k <= q) & (torch.rand(()) < 2)

        p = torch.arange(LENGTH)
        rows = torch.vmap(torch.vmap(row, (None, 0), randomness="same"), (0, None), randomness="same")
        return rows(p, p)[None, None]

    assert not divided(Model(of_numbers), torch.randn(2, LENGTH, 8))
    assert torch._C._functorch.maybe_current_level() is None


@pytest.mark.quick(
    "by_vmap-xla", "least_number-xla", "window-xla", "written_by_an_input-xla", "of_the_input-xla", "minus_zero-xla",
)  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize(
    "make_mask", [*CAUSAL, *(mask for mask in OTHERS if mask not in (of_an_operator, drawn))], ids=lambda f: f.__name__
)
def test_as_eager(make_mask, device):
    eager, options = Model(make_mask), {"precision": "float32", "blocks": "on"}
    mine = Model(make_mask)
    mine.load_state_dict(eager.state_dict())
    compiled = torch.compile(mine.to(device), backend="kp_tpu", options=options)
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    for length in (LENGTH, LENGTH):
        x = torch.randn(2, length, 8)
        results, expected = compiled(x.to(device)), eager(x)
        for run in (results, expected):
            run[0].square().sum().backward()
        close([t.cpu() for t in results], list(expected))
    close([p.grad.cpu() for p in mine.parameters()], [p.grad for p in eager.parameters()])
