"""Models of repeated layers, divided: results, gradients and buffers are eager's, on both kinds of device."""

import copy

import pytest
import torch

from kp_dynamo.config.options import CompileOptions
from kp_dynamo.runtime.events import CaptureDivided
from kp_dynamo.session import Session
from tests.blocks import stacks
from tests.spine import DEVICES, on


def x_of(*shape):
    return torch.randn(shape)


KEEP = torch.ones(5, 5, dtype=torch.bool).tril()
# Model, arguments, and (runs of each piece).
MODELS = {
    "plain": (stacks.Stack, lambda: (x_of(2, 5, 3),), (1, 4, 1)),
    "dropout 0": (lambda: stacks.Stack(3, lambda: stacks.Layer(0.0)), lambda: (x_of(2, 5, 3),), (1, 3, 1)),
    "hidden states": (stacks.WithHiddenStates, lambda: (x_of(2, 5, 3),), (1, 4, 1)),
    "u-net": (lambda: stacks.UNet(8), lambda: (x_of(2, 5, 3),), (1, 4, 4, 1)),
    "shared": (stacks.Shared, lambda: (x_of(2, 5, 3),), (1, 4, 1)),
    "masked": (stacks.Masked, lambda: (x_of(2, 5, 8), KEEP), (1, 4)),
    "encoder and decoder": (stacks.EncoderDecoder, lambda: (x_of(2, 8), x_of(2, 8)), (3, 3)),
    "alternating": (stacks.Alternating, lambda: (x_of(2, 5, 8),), (3,)),
    "resnet": (stacks.ResNet, lambda: (x_of(2, 3, 6, 6),), (1, 4, 1)),
    "caches": (
        stacks.Cached,
        lambda: (x_of(2, 1, 8), torch.tensor([3]), [torch.randn(2, 6, 8) for _ in range(4)]),
        (4,),
    ),
    "frozen": (lambda: stacks.Frozen(6), lambda: (x_of(2, 5, 3),), (1, 3, 3, 1)),
    "checkpoint": (stacks.Checkpointed, lambda: (x_of(2, 5, 3),), (1, 4, 1)),
    "views": (stacks.Views, lambda: (x_of(2, 5, 3),), (1, 4, 1)),
    "in place": (stacks.InPlace, lambda: (x_of(2, 5, 3),), None),
    "numbered": (stacks.Numbered, lambda: (x_of(2, 5, 3),), None),
}


def is_float(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def divided(model, **options):
    """The compiled model, and a list of what became of each graph."""
    events = []
    session = Session(observe=lambda event: events.append(event) if isinstance(event, CaptureDivided) else None)
    options = CompileOptions(**{"precision": "float32", "blocks": "on", **options})
    return torch.compile(model, backend=session.as_backend(options)), events


def step(model, args, *, trains):
    """Results, gradients of a weighted sum of the float ones, and buffers."""
    with torch.set_grad_enabled(trains):
        results = model(*args)
    flat = [r for r in torch.utils._pytree.tree_leaves(results) if is_float(r)]
    if trains:
        sum((r * torch.linspace(0.5, 1.5, r.numel(), device=r.device).view(r.shape)).sum() for r in flat).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    wanted = [a for a in args if is_float(a) and a.requires_grad]
    return results, gradients, dict(model.named_buffers()), [a.grad for a in wanted]


def flat(tree):
    """All floating-point numbers of a tree, in float64."""
    leaves = [t.detach().cpu().double().flatten() for t in torch.utils._pytree.tree_leaves(tree) if is_float(t)]
    return torch.cat(leaves) if leaves else torch.zeros(0, dtype=torch.float64)


def distances(tree, exact):
    """The norm of the difference over the norm, for each of the parts of a step."""
    return [
        float((flat(a) - flat(b)).norm() / flat(b).norm().clamp(min=1e-30)) for a, b in zip(tree, exact, strict=True)
    ]


def named(part):
    return {name.removeprefix("_orig_mod."): value for name, value in part.items()}


WAYS = [(name, trains) for name in MODELS for trains in (False, True) if (name, trains) != ("caches", True)]


# Training holds the forward of inference, and XLA tensors show it without copies.
EVERY = [
    pytest.param(name, trains, device, marks=[] if trains or device == "xla" else [pytest.mark.slow])
    for name, trains in WAYS
    for device in DEVICES
]


@pytest.mark.quick(
    "plain-True-cpu", "plain-False-xla", "hidden states-True-xla", "masked-True-xla", "encoder and decoder-True-xla",
    "alternating-True-xla", "resnet-True-xla", "caches-False-xla", "frozen-True-xla", "frozen-False-cpu",
    "checkpoint-True-xla", "views-True-xla", "in place-True-cpu", "numbered-False-xla",
)  # fmt: skip
@pytest.mark.parametrize(("name", "trains", "device"), EVERY)
def test_as_eager(name, device, trains):
    make, arguments, expected_runs = MODELS[name]
    eager, args = make().train(trains), arguments()
    # Without a gradient, the first layer differs from the others, whose inputs have one.
    args = on("cpu", [a.requires_grad_(trains) if is_float(a) else a for a in args])
    exact, mine = copy.deepcopy(eager).double(), copy.deepcopy(eager).to(device)
    compiled, events = divided(mine)
    given, rounded = on(device, args), on("cpu", args)
    precise = torch.utils._pytree.tree_map(as_float64, on("cpu", args))
    for _ in range(2):
        results = [step(m, a, trains=trains) for m, a in ((compiled, given), (eager, rounded), (exact, precise))]
        got, wanted, reference = (
            (*r[:1], named(r[1]), named(r[2]), r[3], a) for r, a in zip(results, (given, rounded, precise), strict=True)
        )
        assert_alike(got, wanted)
        for distance, of_eager in zip(distances(got, reference), distances(wanted, reference), strict=True):
            assert distance <= max(1e-6, 2 * of_eager)
        for model in (mine, eager, exact):
            model.zero_grad()
    if (name, trains) == ("frozen", True):  # the input of the fourth layer wants no gradient
        expected_runs = (1, 3, 1, 2, 1)
    assert (tuple(piece.runs for piece in events[0].pieces) or None) == expected_runs, events[0].reason


FROZEN = {
    "embedding": (lambda: stacks.Stack(5), (1, 4, 1)),
    "shared layer": (stacks.Shared, (1, 3, 1)),
    "adapters": (lambda: stacks.Stack(5, stacks.Adapted), (1, 4, 1)),
    "no embedding": (lambda: stacks.Unembedded(5), (1, 4, 1)),
    "two stages": (lambda: stacks.UNet(8), (1, 3, 4, 1)),
}


@pytest.mark.quick("shared layer", "adapters", "no embedding", "two stages")
@pytest.mark.parametrize("name", FROZEN)
def test_the_first_layer_needs_no_gradient_of_its_input(name):
    """It belongs to what precedes the other layers, which are found."""
    make, expected_runs = FROZEN[name]
    eager = make()
    eager.embed.requires_grad_(False)
    exact, x = copy.deepcopy(eager).double(), x_of(2, 5, stacks.WIDTH if name == "no embedding" else 3)
    mine, events = divided(copy.deepcopy(eager))
    runs = ((mine, x), (eager, x), (exact, x.double()))
    got, wanted, reference = (step(model, (given,), trains=True) for model, given in runs)
    assert [g is None for g in got[1].values()] == [g is None for g in wanted[1].values()]
    got, wanted, reference = ((r[0], named(r[1])) for r in (got, wanted, reference))
    for distance, of_eager in zip(distances(got, wanted), distances(wanted, reference), strict=True):
        assert distance <= max(1e-6, 2 * of_eager)
    assert tuple(piece.runs for piece in events[0].pieces) == expected_runs


def as_float64(value):
    return value.detach().double().requires_grad_(value.requires_grad) if is_float(value) else value


def assert_alike(got, wanted):
    """Structure, dtypes, shapes; on the CPU strides, and which results share memory."""
    mine, eager = (torch.utils._pytree.tree_flatten(tree) for tree in (got, wanted))
    assert mine[1] == eager[1]
    tensors = [(a, b) for a, b in zip(mine[0], eager[0], strict=True) if isinstance(b, torch.Tensor)]
    assert [(a.dtype, a.shape, a.requires_grad) for a, _ in tensors] == [
        (b.dtype, b.shape, b.requires_grad) for _, b in tensors
    ]
    if tensors[0][0].device.type == "cpu":
        assert [a.stride() for a, _ in tensors] == [b.stride() for _, b in tensors]
        assert sharing([a for a, _ in tensors]) == sharing([b for _, b in tensors])


def sharing(tensors):
    storages = [t.untyped_storage()._cdata for t in tensors]
    return [storages.index(s) for s in storages]
