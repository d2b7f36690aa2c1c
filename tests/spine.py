"""For tests of the whole way of a graph: compile with `kp_tpu`, run on both kinds of device, compare with eager."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping

import torch
from torch.utils import _pytree as pytree

from kp_dynamo import cache_stats
from kp_dynamo.telemetry import snapshot

# Tensors on the CPU are placed by the backend; those on "xla" are there already.
DEVICES = ("cpu", "xla")


def compiled(fn: Callable, *, fullgraph: bool = False, dynamic: bool | None = None, **options: object) -> Callable:
    """`fn` through the backend, without casts unless `options` ask for them."""
    options = {"precision": "float32", **options}
    return torch.compile(fn, backend="kp_tpu", fullgraph=fullgraph, dynamic=dynamic, options=options)


def on(device: str, tree: object) -> object:
    """A copy of `tree` with its tensors on `device`; one that occurs twice stays one, leaves keep requires_grad."""
    copies: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            # A view with overlap is copied as the view it is.
            copied = empty.copy_(tensor.detach()) if 0 not in tensor.stride() or tensor.numel() < 2 else tensor.detach()
            copies[id(tensor)] = copied.to(device).requires_grad_(tensor.requires_grad)
        return copies[id(tensor)]

    return pytree.tree_map_only(torch.Tensor, copy, tree)


def assert_same(actual: object, expected: object) -> None:
    """Equal trees: structure, dtypes, shapes, and values to 1e-5, some 80 roundings of float32.

    Results on the CPU have eager's strides as well; XLA tensors have none of their own.
    """
    got, got_tree = pytree.tree_flatten(actual)
    wanted, wanted_tree = pytree.tree_flatten(expected)
    assert got_tree == wanted_tree
    for mine, eager in zip(got, wanted, strict=True):
        if not isinstance(eager, torch.Tensor):
            assert type(mine) is type(eager)
            assert mine == eager
            continue
        torch.testing.assert_close(
            mine.detach().cpu(), eager.detach(), rtol=1e-5, atol=1e-6, equal_nan=True,
            check_stride=mine.device.type == "cpu",
        )  # fmt: skip


def check_like_eager(fn: Callable, *args: object, **how: object) -> None:
    """`fn` compiled gives what eager gives and leaves the same in its arguments, on both devices, at two calls."""
    for device in DEVICES:
        run = compiled(fn, **how)
        mine, eager = on(device, args), on("cpu", args)
        for _ in range(2):
            results = run(*mine)
            assert_same((results, mine), (fn(*eager), eager))
            devices = {t.device.type for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor)}
            assert devices <= {device}


def check_gradients_like_eager(fn: Callable, *args: object, **how: object) -> None:
    """The gradients of sum(result * ramp) by the arguments that want one, on both devices."""
    expected = _gradients(fn, on("cpu", args))
    for device in DEVICES:
        assert_same(_gradients(compiled(fn, **how), on(device, args)), expected)


def _gradients(fn: Callable, args: tuple) -> tuple:
    result = fn(*args)
    ramp = torch.linspace(-1, 1, result.numel()).reshape(result.shape).to(result.device)
    leaves = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor) and t.requires_grad]
    return result, torch.autograd.grad((result * ramp).sum(), leaves)


class Counted(dict):
    """What happened inside `counted`: "graphs", "programs", "aot_traces", "hits", "capture_hits", "evictions"."""

    __getattr__ = dict.__getitem__


@contextlib.contextmanager
def counted() -> Iterator[Counted]:
    """Count what the backend does inside; filled in at the end."""
    before, delta = _counts(), Counted()
    yield delta
    delta.update({name: value - before[name] for name, value in _counts().items()})


def _counts() -> dict[str, int]:
    counts, stats = snapshot(), cache_stats()
    return {
        **{name: counts[name] for name in ("graphs", "programs", "aot_traces")},
        "fallbacks": sum(counts["fallbacks"].values()),
        "hits": stats["hits"],
        "evictions": stats["evictions"],
        "capture_hits": stats["captures"]["hits"],
    }


def run_script(source: str, env: Mapping[str, str] | None = None, timeout_s: float = 120) -> str:
    """What a process of its own prints when it runs `source`; fails with its error output if it fails."""
    environment = {**os.environ, "PJRT_DEVICE": "CPU", **(env or {})}
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
