"""Checks that need four devices and SPMD, which are properties of a whole process: many in one, answers as JSON.

`python -m tests.spmd.worker CHECK...` runs these checks, by default the quick ones. A check returns what JSON has, or
raises: then its answer is the error as text.
"""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from kp_dynamo import (
    TPUBackend,
    TPUCheckpointError,
    TPUConfig,
    XLADistributedTraining,
    XLAUtilities,
    clear_cache,
    create_xla_integration,
    load_checkpoint,
    save_checkpoint,
)
from kp_dynamo.api.batch_hook import BatchMesh
from kp_dynamo.compat import xla
from kp_dynamo.telemetry import snapshot
from tests.cross_entropies import fuse_small_heads
from tests.worker_checks import Checks

STEPS = 20
CHECKS = Checks()
check, slow_check = CHECKS.check, CHECKS.slow_check


def devices() -> XLADistributedTraining:
    return create_xla_integration(TPUConfig(topology="pod"))[1]


def mesh(*shape: int) -> xs.Mesh:
    return xs.Mesh(list(range(4)), shape)


def sharding(tensor: torch.Tensor) -> str:
    return xla.xlac()._get_xla_sharding_spec(tensor)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(F.gelu(self.up(x))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(16, 4))


def batches(rows: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 16, generator=generator), torch.randn(rows, 4, generator=generator)) for _ in range(STEPS)
    ]


def compiled(what: Any, backend: str = "kp_tpu", **options: Any) -> Any:
    options = {"options": {"precision": "float32", **options}} if backend == "kp_tpu" else {}
    return torch.compile(what, backend=backend, **options)


def trained(module: nn.Module, run: Any, device: str, optimizer: Any = torch.optim.AdamW, rows: int = 8) -> list[float]:
    """The losses of twenty steps."""
    losses, steps = [], optimizer(module.parameters(), lr=1e-2)
    for x, y in batches(rows):
        steps.zero_grad()
        loss = F.mse_loss(run(x.to(device)), y.to(device))
        loss.backward()
        steps.step()
        if device == "xla":
            torch_xla.sync()
        losses.append(loss.item())
    return losses


def off(losses: list[float], expected: list[float]) -> list[float]:
    return [abs(mine - eager) for mine, eager in zip(losses, expected, strict=True)]


def weights_off(mine: nn.Module, eager: nn.Module) -> float:
    pairs = zip(mine.parameters(), eager.parameters(), strict=True)
    return max((a.detach().cpu() - b.detach()).abs().max().item() for a, b in pairs)


@contextlib.contextmanager
def programs() -> Iterator[list[int]]:
    counts = [snapshot()["programs"]]
    yield counts
    counts[0] = snapshot()["programs"] - counts[0]


def _training(optimizer: Any, rows: int = 8) -> dict[str, Any]:
    mine, eager = devices().wrap_model(model()), model()
    with programs() as count:
        losses = trained(mine, compiled(mine), "xla", optimizer, rows)
    expected = trained(eager, eager, "cpu", optimizer, rows)
    return {"loss": max(off(losses, expected)), "weights": weights_off(mine, eager), "programs": count[0]}


@check
def adamw() -> Any:
    return _training(torch.optim.AdamW)


@check
def repeated_layers() -> Any:
    """Four equal layers, compiled once: the shardings of the values between them are those of the arguments."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(16, 16), *(Block() for _ in range(4)), nn.Linear(16, 4))
    mine = devices().wrap_model(copy.deepcopy(eager))
    with programs() as count:
        losses = trained(mine, compiled(mine, blocks="on"), "xla")
    expected = trained(eager, eager, "cpu")
    return {"loss": max(off(losses, expected)), "weights": weights_off(mine, eager), "programs": count[0]}


@check
def sgd() -> Any:
    return _training(torch.optim.SGD)


@check
def uneven_batch() -> Any:
    return _training(torch.optim.AdamW, rows=10)


@slow_check
def fewer_rows_than_devices() -> Any:
    return _training(torch.optim.AdamW, rows=3)


@slow_check
def stock() -> Any:
    mine, eager = devices().wrap_model(model()), model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = trained(mine, compiled(mine, "openxla"), "xla")
    return off(losses, trained(eager, eager, "cpu"))


@check
def weights_that_their_user_shards() -> Any:
    mine, eager = devices().wrap_model(model()), model()
    for block in mine[:2]:
        xs.mark_sharding(block.up.weight, mesh(4), (0, None))
        xs.mark_sharding(block.down.weight, mesh(4), (None, 0))
    losses = trained(mine, compiled(mine), "xla")
    expected = trained(eager, eager, "cpu")
    return {
        "loss": max(off(losses, expected)),
        "weights": weights_off(mine, eager),
        "sharding": sharding(mine[0].up.weight),
    }


@check
def a_whole_step() -> Any:
    mine, eager = devices().wrap_model(model()), model()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(mine(x), y)

    step = torch.compile(loss_of, backend="kp_tpu", fullgraph=True, options={"precision": "float32"})
    x, y = batches()[0]
    loss = step(x.to("xla"), y.to("xla"))
    loss.backward()
    expected = F.mse_loss(eager(x), y)
    expected.backward()
    gradients = zip(mine.parameters(), eager.parameters(), strict=True)
    return {
        "loss": (loss.detach().cpu() - expected.detach()).abs().item(),
        "gradients": max((a.grad.cpu() - b.grad).abs().max().item() for a, b in gradients),
    }


class Head(nn.Module):
    """A head of 300 classes and its loss with smoothed labels, some of them ignored, and a z-loss."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(16, 300)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.block(x))
        return F.cross_entropy(logits, target, label_smoothing=0.1) + 0.1 * logits.logsumexp(1).square().mean()


@slow_check
def a_head_by_blocks() -> Any:
    """The weight of the head is sharded by classes, as its user may; the rows are sharded by the batch."""
    torch.manual_seed(0)
    eager = Head()
    with pytest.MonkeyPatch.context() as patch:
        rewritten = fuse_small_heads(patch)
        found = []
        for is_sharded in (False, True):
            clear_cache()
            mine = devices().wrap_model(copy.deepcopy(eager))
            if is_sharded:
                xs.mark_sharding(mine.head.weight, mesh(4), (0, None))
            x, target = batches()[0][0], torch.tensor([0, 299, -100, 7, 150, -100, 128, 1])
            loss, expected = compiled(mine)(x.to("xla"), target.to("xla")), eager(x, target)
            gradients = torch.autograd.grad(loss, list(mine.parameters()))
            pairs = zip(gradients, torch.autograd.grad(expected, list(eager.parameters())), strict=True)
            found.append(max((a.cpu() - b).abs().max().item() for a, b in [(loss.detach(), expected), *pairs]))
    return {"difference": max(found), "rewritten": sum(rewritten)}


@check
def what_the_devices_hold() -> Any:
    """A hook of torch's own Sequential is part of the graph, that of a user's class runs before it."""
    found = []
    for module in (model(), Block()):
        mine = devices().wrap_model(module)
        x = batches()[0][0].to("xla")
        with torch.no_grad():
            result = compiled(mine)(x)
        found.append([sharding(t) for t in (x, next(mine.parameters()), result)])
    return found


@check
def a_batch_that_is_sent_in_parts() -> Any:
    given = {"x": torch.randn(8, 4), "lengths": [torch.arange(8), torch.ones(3, 8)], "scale": torch.tensor(2.0)}
    sent = devices().shard_batch(given)
    tensors = [sent["x"], *sent["lengths"], sent["scale"]]
    return [[sharding(t) for t in tensors], torch.equal(sent["x"].cpu(), given["x"]), given["x"].device.type]


@check
def maxima_of_nan() -> Any:
    x = torch.randn(8, 4)
    x[5, 1], x[6, 2], x[6, 1] = float("nan"), float("inf"), float("inf")
    mine, differences = devices().shard_batch(x), []
    maxima = lambda x: x.amax(0), torch.max, lambda x: x.min(0, keepdim=True), lambda x: x.norm(float("inf"))
    for function in (*maxima, lambda x: x.logsumexp(0)):
        pairs = zip(tree_leaves(compiled(function)(mine)), tree_leaves(function(x)), strict=True)
        differences += [torch.allclose(result.cpu(), expected, equal_nan=True) for result, expected in pairs]
    return differences


@check
def normalizations() -> Any:
    def gradient(function: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        ramp = torch.linspace(-1, 1, x.numel()).reshape(x.shape).to(x.device)
        return torch.autograd.grad((function(x) * ramp).sum(), x)[0]

    torch.manual_seed(0)
    found, x = [], torch.randn(8, 4, 6)
    for function in (lambda x: F.layer_norm(x, (6,)), lambda x: F.group_norm(x, 2)):
        run, mine = compiled(function), devices().shard_batch(x)
        for result, expected in ((run(mine), function(x)), (gradient(run, mine), gradient(function, x))):
            found.append([sharding(result), (result.cpu() - expected).abs().max().item()])
    return found


@check
def writes_by_index() -> Any:
    """Largest differences of scatters whose operand is sharded: XLA's partitioner ends the process over them."""
    torch.manual_seed(0)
    x, index = torch.randn(8, 6), torch.tensor([0, 3])
    rows = index.view(-1, 1).expand(2, 6)
    functions = [
        lambda x, index, rows: x.index_put((index,), x[1:3].clone(), accumulate=True),
        lambda x, index, rows: x.scatter_add(0, rows, x[1:3].clone()),
        lambda x, index, rows: x.scatter(0, rows, x[1:3].clone()),
        lambda x, index, rows: x.scatter_reduce(0, rows, x[1:3].clone(), "amax"),
        lambda x, index, rows: x.index_add(0, index, x[1:3].clone()),
        lambda x, index, rows: x.index_add(0, index, x[:2]),
        lambda x, index, rows: x.index_put((index,), x[: index.shape[0]]),
        # A single row, cut from shared ones, into even parts.
        lambda x, index, rows: torch.zeros_like(x[:4, :4]).scatter(0, rows[1:, :4], x[-1:, :4]),
        lambda x, index, rows: torch.zeros_like(x[:4, :4]).index_copy(0, index[1:], x[-1:, :4]),
        lambda x, index, rows: torch.zeros_like(x[:4, :4]).index_put((index[1:],), x[-1:, :4]),
    ]
    mine = [devices().shard_batch(x), index.to("xla"), rows.to("xla")]
    found = [(compiled(f)(*mine).cpu() - f(x, index, rows)).abs().max().item() for f in functions]
    return [*found, _gradient_beside_a_scatter()]


def _gradient_beside_a_scatter() -> float:
    """Largest difference of a gradient whose other addend is shared: the partitioner would share the scatter's too."""

    def gradient(x: torch.Tensor, run: Any) -> torch.Tensor:
        return torch.autograd.grad(sum(part.sum() for part in run(x)), x)[0]

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        column = x[:, None]
        return (column * 3).gather(1, torch.zeros_like(column, dtype=torch.long)), column.exp()

    x = torch.randn(6)
    mine = gradient(devices().shard_batch(x).requires_grad_(), compiled(function))
    return (mine.cpu() - gradient(x.requires_grad_(), function)).abs().max().item()


@check
def pads_that_cut() -> Any:
    """Largest differences beside another reader of sharded rows, of results and of gradients."""
    torch.manual_seed(0)
    functions = [
        lambda x: F.pad(x, (0, 0, 1, -1)) + x.sin(),
        lambda x: F.pad(x, (0, 0, -2, 2), value=0.5) * x,
        lambda x: F.pad(x, (1, 0, -1, -1)),
        lambda x: F.pad(x, (0, 0, 2, -2)).sum() + x.exp().sum(),
    ]
    found = []
    for function in functions:
        x = torch.randn(8, 3)
        mine, eager = devices().shard_batch(x).requires_grad_(), x.clone().requires_grad_()
        results = compiled(function)(mine), function(eager)
        weights = torch.linspace(-1, 1.3, results[1].numel()).reshape(results[1].shape)
        (results[0] * weights.to("xla")).sum().backward()
        (results[1] * weights).sum().backward()
        found += [(results[0].cpu() - results[1]).abs().max().item(), (mine.grad.cpu() - eager.grad).abs().max().item()]
    return found


@check
def saved_beside_the_cpu() -> Any:
    """Largest difference of a gradient of uneven complex shards, in pieces around an operator of the CPU."""
    torch.manual_seed(0)
    x, y = torch.randn(5), torch.randn(5)

    def spectrum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(torch.stack([x, y + 0.3], -1))
        return torch.linalg.matrix_exp((z * z + 5).log()[:, None, None]).abs()

    mine, eager = (devices().shard_batch(y)).requires_grad_(), y.clone().requires_grad_()
    compiled(spectrum)(devices().shard_batch(x), mine).abs().sum().backward()
    spectrum(x, eager).abs().sum().backward()
    return (mine.grad.cpu() - eager.grad).abs().max().item()


@check
def transforms() -> Any:
    """Largest difference of Fourier transforms and their gradients, along rows and along the sharded dimension."""
    functions = [
        lambda x: torch.fft.rfft(x).abs(),
        lambda x: torch.fft.fft(x, dim=0, norm="ortho").abs(),
        lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * 2, s=x.shape),
        lambda x: x.unfold(1, 3, 2).sum(-1),
        lambda x: x.unfold(0, 2, 1).sum(-1),
    ]
    found = []
    for rows in (8, 5):
        for function in functions:
            x = torch.randn(rows, 6)
            mine, eager = devices().shard_batch(x).requires_grad_(), x.clone().requires_grad_()
            results = compiled(function)(mine), function(eager)
            results[0].square().sum().backward(), results[1].square().sum().backward()
            found += [(results[0].cpu() - results[1]).abs().max(), (mine.grad.cpu() - eager.grad).abs().max()]
    return max(found).item()


@check
def transform_of_a_divided_dimension() -> Any:
    """Largest difference of a gradient: partitioned, XLA:CPU chooses a layout for its transform that it cannot run."""

    def phases(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.ifft(torch.polar(x.abs() + 0.2, x)).angle().cos()

    x = torch.randn(2, 11)
    mine, eager = x.to("xla"), x.clone().requires_grad_()
    xs.mark_sharding(mine, xs.Mesh(range(4), (2, 2), ("a", "b")), (None, "a"))
    compiled(phases)(mine.requires_grad_()).sum().backward()
    phases(eager).sum().backward()
    return (mine.grad.cpu() - eager.grad).abs().max().item()


@check
def searches() -> Any:
    """Whether searches of sharded numbers and for sharded values are eager's."""
    numbers, values = torch.randn(8, 5).sort(-1).values, torch.randn(8, 3)
    pairs = [
        (compiled(torch.searchsorted)(*map(devices().shard_batch, (numbers, values))), (numbers, values)),
        (compiled(torch.searchsorted)(numbers[0].to("xla"), devices().shard_batch(values)), (numbers[0], values)),
    ]
    return [torch.equal(mine.cpu(), torch.searchsorted(*args)) for mine, args in pairs]


@check
def reductions_to_booleans() -> Any:
    """Whether those of shared rows, whole and along them, are those of one device."""
    x = torch.linspace(-1, 1, 24).reshape(8, 3)
    functions = [
        lambda x: x.all() + torch.ones((), dtype=torch.int8, device=x.device),
        lambda x: x.any(0),
        lambda x: x.all((0, 1), keepdim=True),
        lambda x: (x > 0).to(torch.uint8).any(),
        lambda x: (x > 0).all(0).prod(),
    ]
    mine = devices().shard_batch(x)
    pairs = [(compiled(f)(mine).cpu(), f(x)) for f in functions]
    return [a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs]


@check
def wrapped_twice() -> Any:
    manager = create_xla_integration(TPUConfig())[0]
    mine = Block()
    for mesh_shape in ((4,), (2, 2)):
        XLADistributedTraining(manager, mesh_shape).wrap_model(mine)
    x = batches()[0][0].to("xla")
    mine(x)
    return [len(mine._forward_pre_hooks), sharding(x)]


@check
def wrapped_after_it_was_compiled() -> Any:
    wrapping = devices()
    mine, found = Block().to("xla"), []
    run = compiled(mine)
    for wrap in (False, True):
        if wrap:
            wrapping.wrap_model(mine)
        found.append(sharding(run(batches()[0][0].to("xla"))))
    return found


@check
def copies_of_a_wrapped_model() -> Any:
    mine = devices().wrap_model(Block())
    file = io.BytesIO()
    torch.save(copy.deepcopy(mine).cpu(), file)
    file.seek(0)
    again = torch.load(file, weights_only=False).to("xla")
    x = batches()[0][0].to("xla")
    again(x)
    return [sharding(x), len(devices().wrap_model(again)._forward_pre_hooks)]


@check
def models_of_a_class_are_captured_once() -> Any:
    torch._dynamo.reset()
    models = [devices().wrap_model(nn.Linear(16, 4)) for _ in range(4)]

    @torch.compile(backend="kp_tpu")
    def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module(x)

    torch._dynamo.utils.counters.clear()
    for each in models:
        run(each, batches()[0][0].to("xla"))
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@check
def inputs_of_several_kinds() -> Any:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, scale: Any, *, mask: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return x * scale["by"] * mask + bias

    x, mask, bias, by = torch.randn(8, 4), torch.ones(8, 1), torch.randn(4), torch.tensor(2.0)
    mine = devices().wrap_model(Model())
    given = [t.to("xla") for t in (x, mask, bias, by)]
    result = compiled(mine)(given[0], {"by": given[3]}, mask=given[1], bias=given[2])
    return [[sharding(t) for t in given], (result.cpu() - (x * 2 + bias)).abs().max().item()]


@check
def a_model_without_tensors() -> Any:
    class Model(nn.Module):
        def forward(self, length: int) -> torch.Tensor:
            return torch.ones(length, device="xla")

    return devices().wrap_model(Model())(3).tolist()


@check
def another_sharding_is_another_program() -> Any:
    run = compiled(lambda x: x.sin() @ x.T)
    values, counts = torch.arange(64.0).reshape(8, 8), []
    for spec in (None, (0, None), (None, 0), (0, None), None):
        x = values.to("xla")
        if spec is not None:
            xs.mark_sharding(x, mesh(4), spec)
        with programs() as count:
            torch.testing.assert_close(run(x).cpu(), values.sin() @ values.T, rtol=1e-5, atol=1e-5)
        counts.append(count[0])
    return counts


@check
def a_tensor_that_is_sharded_anew() -> Any:
    run, values = compiled(lambda x: x * 2), torch.arange(8.0)
    x, found = values.to("xla"), []
    for spec in ((0,), (None,), (0,)):
        xs.clear_sharding(x)
        xs.mark_sharding(x, mesh(4), spec)
        result = run(x)
        found.append([sharding(result), torch.equal(result.cpu(), values * 2)])
    return found


@check
def a_tensor_that_has_lost_its_mark() -> Any:
    """torch_xla takes the mark off, and leaves the tensor in its parts."""
    run, values, found = compiled(lambda x: x * 3 + 1), torch.arange(8.0), []
    for was_used in (False, True):
        x = values.to("xla")
        xs.mark_sharding(x, mesh(4), (0,))
        assert not was_used or (x + 1).sum().item() == 36
        xs.clear_sharding(x)
        found.append(torch.equal(run(x).cpu(), values * 3 + 1))
    return found


@check
def a_mesh_of_two_axes() -> Any:
    distributed = create_xla_integration(TPUConfig(topology="pod"))[0]
    mine, eager = XLADistributedTraining(distributed, mesh_shape=(2, 2)).wrap_model(Block()), Block()
    eager.load_state_dict({name: value.cpu() for name, value in mine.state_dict().items()})
    x = batches()[0][0].to("xla")
    with torch.no_grad():
        result = compiled(mine)(x)
        return [sharding(x), (result.cpu() - eager(x.cpu())).abs().max().item()]


@check
def a_mesh_that_does_not_fit() -> Any:
    return XLADistributedTraining(create_xla_integration(TPUConfig())[0], mesh_shape=(3,))


@check
def a_model_that_was_wrapped_for_other_devices() -> Any:
    mine = devices().wrap_model(Block())
    (number,) = mine._forward_pre_hooks
    mine._forward_pre_hooks[number] = type(mine._forward_pre_hooks[number])(BatchMesh((8,)))
    return mine(batches()[0][0].to("xla"))


@check
def a_mesh_that_is_a_number() -> Any:
    return XLADistributedTraining(create_xla_integration(TPUConfig())[0], mesh_shape=4)


@check
def single_is_asked_for() -> Any:
    return create_xla_integration(TPUConfig(topology="single"))


@check
def what_the_object_api_says() -> Any:
    manager, distributed, _ = create_xla_integration(TPUConfig())
    backend = TPUBackend()
    return {
        "stats": manager.get_device_stats(),
        "backend": [str(backend.device), backend.world_size, backend.rank, backend.device_count],
        "training": [distributed.is_distributed, distributed.mesh_shape],
    }


@check
def collectives() -> Any:
    distributed = devices()
    x = torch.arange(8.0).to("xla")
    xs.mark_sharding(x, mesh(4), (0,))
    reduced, gathered = distributed.all_reduce(x, op="mean"), distributed.all_gather(x)
    distributed.barrier()
    return [reduced.tolist(), gathered.tolist()]


@check
def a_model_on_the_cpu() -> Any:
    mine, eager = model(), model()
    losses = trained(mine, compiled(mine), "cpu")
    return max(off(losses, trained(eager, eager, "cpu")))


@check
def dropout() -> Any:
    run = compiled(lambda x: F.dropout(x, 0.3))
    x = torch.ones(8, 6, device="xla")
    xs.mark_sharding(x, mesh(4), (0, None))
    torch.manual_seed(5)
    first, second = run(x).cpu(), run(x).cpu()
    torch.manual_seed(5)
    return [first.tolist(), torch.equal(first, second), torch.equal(first, run(x).cpu())]


@check
def an_operator_on_the_cpu() -> Any:
    run = compiled(lambda x: torch.linalg.eigvals(x + 1).abs().sort().values * 2)
    x = torch.eye(4)
    mine = x.to("xla")
    xs.mark_sharding(mine, mesh(4), (0, None))
    expected = torch.linalg.eigvals(x + 1).abs().sort().values * 2
    return [(run(mine).cpu() - expected).abs().max().item() for _ in range(2)]


@check
def marks_inside_a_graph() -> Any:
    def by_operator(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.xla.dynamo_mark_sharding(x * 2, [0, 1, 2, 3], [4], "None", "(0, None)") + 1

    def by_function(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.xla.aot_mark_sharding(x, four, "(0, None)") * 2 + 1

    four = str(mesh(4))
    x, found = torch.arange(32.0).reshape(8, 4), []
    for function in (by_operator, by_function):
        result = compiled(function)(x.to("xla"))
        found.append([sharding(result), torch.equal(result.cpu(), x * 2 + 1)])
    return found


@check
def a_public_mark_inside_a_graph() -> Any:
    four = mesh(4)

    def marked(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        xs.mark_sharding(y, four, (0, None))
        return y + 1

    x = torch.arange(32.0).reshape(8, 4)
    return torch.equal(compiled(marked)(x.to("xla")).cpu(), x * 2 + 1)


@check
def a_public_mark_that_dynamo_leaves_alone() -> Any:
    four, mark = mesh(4), torch.compiler.disable(xs.mark_sharding)

    def marked(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        mark(y, four, (None, 0))
        return y + 1

    x = torch.arange(32.0).reshape(8, 4)
    result = compiled(marked)(x.to("xla"))
    return [sharding(result), torch.equal(result.cpu(), x * 2 + 1)]


@check
def a_tensor_of_torch_xlas_subclass() -> Any:
    wrapped = xs.mark_sharding(torch.arange(8.0).to("xla"), mesh(4), (0,))
    return compiled(lambda x: x * 2)(wrapped).cpu().tolist()


@check
def donated_buffers() -> Any:
    def step(weight: torch.Tensor, gradient: torch.Tensor) -> None:
        weight.sub_(gradient * 0.5)

    run = compiled(step, donate="mutated")
    weight, expected, gradient = torch.arange(32.0).reshape(8, 4), torch.arange(32.0).reshape(8, 4), torch.ones(8, 4)
    mine = weight.to("xla")
    xs.mark_sharding(mine, mesh(4), (0, None))
    for _ in range(3):
        run(mine, gradient.to("xla"))
        step(expected, gradient)
    return [torch.equal(mine.cpu(), expected), sharding(mine)]


@check
def uneven_parts_are_not_donated() -> Any:
    run = compiled(lambda x: x.mul_(2), donate="mutated")
    mine = torch.arange(6.0).to("xla")
    xs.mark_sharding(mine, mesh(4), (0,))
    for _ in range(2):
        run(mine)
    return mine.cpu().tolist()


@check
def lengths_that_are_padded() -> Any:
    run = torch.compile(
        lambda x: x.softmax(dim=1), backend="kp_tpu", dynamic=True, options={"buckets": [8, 16], "precision": "float32"}
    )
    found = []
    with programs() as count:
        for length in (5, 7, 8, 11):
            x = torch.randn(8, length)
            mine = x.to("xla")
            xs.mark_sharding(mine, mesh(4), (0, None))
            found.append((run(mine).cpu() - x.softmax(dim=1)).abs().max().item())
    return [max(found), count[0]]


@check
def what_is_compiled_for_one_chip() -> Any:
    """An export is that of one device, and says nothing of shardings."""
    texts = XLAUtilities.debug_xla_graph(devices().wrap_model(model()), torch.ones(8, 16))["stablehlo"]
    whole = "".join(texts.values())
    return [whole.count(word) for word in ("Sharding", "sharding", "rsqrt")]


@check
def a_checkpoint_that_is_loaded() -> Any:
    """Into weights that are sharded in part: shardings, how far off values are; the same where it fails midway."""
    saved = nn.Sequential(Block(), nn.Linear(16, 4))
    mine = devices().wrap_model(nn.Sequential(Block(), nn.Linear(16, 4)))
    xs.mark_sharding(mine[0].up.weight, mesh(4, 1), (0, 1))
    xs.mark_sharding(mine[0].down.weight, mesh(1, 4), (0, 1))
    before = [sharding(p) for p in mine.parameters()]
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(f"{folder}/a", saved)
        load_checkpoint(f"{folder}/a", mine)
        after, apart = [sharding(p) for p in mine.parameters()], weights_off(mine, saved)
        save_checkpoint(f"{folder}/a", nn.Sequential(Block(), nn.Linear(16, 4)))
        with contextlib.suppress(TPUCheckpointError), stopped_at(mine[1].bias):
            load_checkpoint(f"{folder}/a", mine)
    return [before, after, apart, [sharding(p) for p in mine.parameters()], weights_off(mine, saved)]


@contextlib.contextmanager
def stopped_at(wanted: torch.Tensor) -> Iterator[None]:
    """The next copy into `wanted` fails."""
    copy = torch.Tensor.copy_

    def fail_once(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if target is wanted:
            torch.Tensor.copy_ = copy
            raise RuntimeError("no more")
        return copy(target, value)

    torch.Tensor.copy_ = fail_once
    yield
    raise AssertionError("nothing failed")


@check
def programs_that_were_let_go() -> Any:
    run, x = compiled(lambda x: x * 3), torch.arange(8.0)
    mine = x.to("xla")
    xs.mark_sharding(mine, mesh(4), (0,))
    found = []
    for _ in range(2):
        found.append(torch.equal(run(mine).cpu(), x * 3))
        clear_cache()
    return found


if __name__ == "__main__":
    create_xla_integration(TPUConfig(topology="pod"))
    CHECKS.run(sys.argv[1:])
