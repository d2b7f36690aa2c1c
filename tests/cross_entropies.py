"""Heads for tests of `fuse_linear_cross_entropy`: their operands and graphs, and the pass on small ones."""

from collections.abc import Callable

import torch
from torch import fx

from kp_dynamo.passes.fold_constants import FoldConstants
from kp_dynamo.passes.fuse_linear_cross_entropy import FuseLinearCrossEntropy
from tests.graphs import trace_joint

ROWS, WIDTH, CLASSES = 6, 4, 300
BLOCK_BYTES = 3 << 10  # three blocks of 128 columns for 300 classes and 6 rows


def fuse_small_heads(monkeypatch) -> list[int]:
    """Lower the threshold of the pass, as no test has logits of 32 MiB; the list gets each run's number of rewrites."""
    create, run = FuseLinearCrossEntropy.__init__, FuseLinearCrossEntropy.__call__
    counts: list[int] = []

    def noting(self, gm):
        report = run(self, gm)
        counts.append(report.rewritten)
        return report

    monkeypatch.setattr(
        FuseLinearCrossEntropy,
        "__init__",
        lambda self, **given: create(self, min_bytes=0, block_bytes=BLOCK_BYTES, **given),
    )
    monkeypatch.setattr(FuseLinearCrossEntropy, "__call__", noting)
    return counts


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """x, weight, bias, and targets of which two are ignored."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(s, generator=generator) for s in ((ROWS, WIDTH), (CLASSES, WIDTH), (CLASSES,)))
    target = torch.arange(ROWS) * 50
    target[1] = target[4] = -100
    return *(t.to(dtype).requires_grad_() for t in (x, weight, bias)), target


def joint(fn: Callable, *arguments: torch.Tensor) -> fx.GraphModule:
    """The joint graph as the pass gets it: constants are folded, and values are not detached."""
    gm = trace_joint(fn, *arguments)
    FoldConstants()(gm)
    return gm


def step(gm: fx.GraphModule, *arguments: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The loss of a joint graph, and the gradients of its arguments."""
    (loss,), gradients = gm(list(arguments), [torch.ones(())])
    return loss, gradients
