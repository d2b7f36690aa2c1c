"""Run a function at many lengths with poisoned padding, and compare with eager."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch.utils import _pytree as pytree

from kp_dynamo.telemetry import snapshot
from tests.spine import compiled

LENGTHS = (7, 2, 3, 5, 8, 11, 13, 16)
BUCKETS = [8, 16]
_MARKED = {"x": (1,), "y": (1,), "ids": (1,), "target": (1,), "keep": (1,), "square": (1, 2)}


def inputs(fn: Callable, length: int, *, trains: bool) -> dict[str, torch.Tensor]:
    """Arguments of `fn` at a length, their lengths marked dynamic."""
    random = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    made = {
        "x": normal(3, length, 4), "y": normal(3, length, 4), "w": normal(4, 4), "v": normal(4),
        "table": normal(10, 4), "places": normal(64, 4), "kernel": normal(4, 4, 3), "square": normal(3, length, length),
        "ids": torch.randint(10, (3, length), generator=random),
        "target": torch.randint(10, (3, length), generator=random),
        "keep": torch.rand(3, length, generator=random) < 0.7,
    }  # fmt: skip
    made["keep"][:, 0] = True
    chosen = {name: made[name] for name in inspect.signature(fn).parameters}
    for name, tensor in chosen.items():
        tensor.requires_grad_(trains and tensor.is_floating_point())
        for d in _MARKED.get(name, ()):
            torch._dynamo.maybe_mark_dynamic(tensor, d)
    return chosen


def outcome(run: Callable, arguments: dict[str, torch.Tensor], *, trains: bool) -> list[torch.Tensor]:
    """Results, and the gradients of their sum by a ramp."""
    with torch.set_grad_enabled(trains):
        results = [r for r in pytree.tree_leaves(run(**arguments)) if isinstance(r, torch.Tensor)]
        leaves = [a for a in arguments.values() if a.requires_grad]
        wanted = [r for r in results if r.requires_grad]
        if not (trains and leaves and wanted):
            return [r.detach() for r in results]
        total = sum((r * torch.linspace(-1, 1, r.numel()).reshape(r.shape)).sum() for r in wanted)
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    return [r.detach() for r in results] + [g for g in gradients if g is not None]


def refused(fn: Callable, *, trains: bool, lengths: tuple[int, ...] = LENGTHS) -> bool:
    """Whether padding was refused; fails where a result is not eager's."""
    torch._dynamo.reset()
    run = compiled(fn, buckets=BUCKETS)
    before = snapshot()["bucket_refusals"]
    for length in lengths:
        arguments = inputs(fn, length, trains=trains)
        expected, found = outcome(fn, arguments, trains=trains), outcome(run, arguments, trains=trains)
        _require_equal(found, expected, lambda given=arguments: _exact(fn, given, trains=trains))
    return snapshot()["bucket_refusals"] > before


def _exact(fn: Callable, arguments: dict[str, torch.Tensor], *, trains: bool) -> list[torch.Tensor]:
    """What eager gives in float64."""
    wide = {
        name: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for name, t in arguments.items()
    }
    return outcome(fn, wide, trains=trains)


def _require_equal(
    found: list[torch.Tensor], expected: list[torch.Tensor], exact: Callable[[], list[torch.Tensor]]
) -> None:
    """To 1e-5, norm over norm of everything together: some 80 roundings of float32. Or nearer to float64 than eager."""
    assert [(t.dtype, t.shape) for t in found] == [(t.dtype, t.shape) for t in expected]
    mine, eager = _flat(found), _flat(expected)
    kept = eager.isfinite()
    assert torch.equal(mine.isfinite(), kept)
    if (mine - eager)[kept].norm() > 1e-5 * eager[kept].norm():
        true = _flat(exact())
        assert (mine - true)[kept].norm() <= (eager - true)[kept].norm()


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.double().flatten() for t in tensors])
