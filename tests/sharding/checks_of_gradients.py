"""Where gradients and the state of optimizers lie, and which programs compute them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from torch import nn

import kp_dynamo
from kp_dynamo.lowering import spmd, tensor_shardings
from kp_dynamo.telemetry import snapshot
from tests.sharding.registry import (
    BOTH,
    DATA,
    Wrapped,
    check,
    compiled,
    placed_as,
    slow_check,
    small,
    spec,
    tokens,
)  # fmt: skip


@slow_check
def accumulated_gradients() -> Any:
    """Two backwards before a step, of batches of other sizes; one parameter was frozen when the model was divided."""
    model, eager = small(), small()
    model[3].weight.requires_grad_(False)
    kp_dynamo.shard(model, DATA, "fsdp")
    frozen = model[3].weight.requires_grad
    model[3].weight.requires_grad_(True)
    run = compiled(model)
    for seed, rows in ((1, 8), (2, 10), (3, 3)):
        run(tokens(seed, rows).to("xla")).pow(2).mean().backward()
        eager(tokens(seed, rows)).pow(2).mean().backward()
    torch_xla.sync()
    misplaced = [name for name, p in model.named_parameters() if spec(p.grad) != spec(p)]
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    return [frozen, misplaced, max((a.grad.cpu() - b.grad).abs().max().item() for a, b in pairs)]


@check
def gradients_of_weights_that_are_marked_by_hand() -> Any:
    """Without the hooks of `shard`: the backward divides the gradients of the weights that it reads."""
    model, eager = small().to("xla"), small()
    mesh, found = xs.Mesh(list(range(8)), (4, 2), ("data", "model")), {}
    for name, axes in (("1.weight", ("model", "data")), ("3.weight", ("data", "model"))):
        xs.mark_sharding(dict(model.named_parameters())[name], mesh, axes)
    run = compiled(model)
    for seed in (1, 2):
        run(tokens(seed).to("xla")).pow(2).mean().backward()
        eager(tokens(seed)).pow(2).mean().backward()
        weights = [(n, p) for n, p in model.named_parameters() if n in ("1.weight", "3.weight")]
        found = found or {name: (spec(weight.grad), spec(weight)) for name, weight in weights}
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    return [found, max((a.grad.cpu() - b.grad).abs().max().item() for a, b in pairs)]


@check
def gradients_that_their_program_divides() -> Any:
    """Without the hooks of `shard`: of weights that the backward reads, and of an embedding and biases."""
    model, eager = small(), small()
    kp_dynamo.shard(model, BOTH, {"0.weight": ("data", "model"), "1": "colwise", "3": "rowwise"})
    for parameter in model.parameters():
        parameter._backward_hooks.clear()
    run = compiled(model)
    run(kp_dynamo.shard_batch(tokens(), BOTH)).pow(2).mean().backward()
    eager(tokens()).pow(2).mean().backward()
    found = {name: [spec(p.grad), spec(p)] for name, p in model.named_parameters()}
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    return [found, max((a.grad.cpu() - b.grad).abs().max().item() for a, b in pairs)]


@check
def equal_backwards_with_other_gradients() -> Any:
    """Without the hooks of `shard`: two backwards that differ only in where the gradient of an embedding lies."""
    found = []
    for axes in (("data", "model"), (None, "model")):
        model = kp_dynamo.shard(nn.Sequential(nn.Embedding(128, 64)), BOTH, {"0.weight": axes})
        model[0].weight._backward_hooks.clear()
        compiled(model)(kp_dynamo.shard_batch(tokens(), BOTH)).pow(2).sum().backward()
        found.append([spec(model[0].weight.grad), spec(model[0].weight)])
    return found


class Windows(nn.Module):
    """Its backward reads a value of six dimensions, as that of a Swin transformer does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = self.up(x).view(8, 2, 4, 2, 4, 128).permute(0, 1, 3, 2, 4, 5).exp()
        return self.down((windows / windows.sum(-1, keepdim=True)).reshape(-1, 16, 128))


@check
def values_of_six_dimensions() -> Any:
    """The error of the gradients, and how many of them there are, on one axis and on two."""
    found = []
    for mesh, sharding in ((DATA, "fsdp"), (BOTH, {"up": "colwise", "down": "rowwise"})):
        model, eager = kp_dynamo.shard(Windows(), mesh, sharding), Windows()
        x = torch.randn(8, 8, 8, 128)
        compiled(model)(kp_dynamo.shard_batch(x, mesh)).pow(2).mean().backward()
        eager(x).pow(2).mean().backward()
        pairs = zip(model.parameters(), eager.parameters(), strict=True)
        found += [((a.grad.cpu() - b.grad).norm() / b.grad.norm()).item() for a, b in pairs]
    return found


class Cameras(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).mean((1, 2, 3, 4))


@check
def batches_of_six_dimensions() -> Any:
    """The errors of a batch that the model divides, of `shard_batch`, and of one that it has divided.

    The last two are those of a compiled function, and of a parameter of six dimensions.
    """
    model, x = Cameras(), torch.randn(8, 2, 3, 2, 2, 128)
    wanted, six = model(x), nn.ParameterList([x.clone()])
    run = compiled(kp_dynamo.shard(model, DATA, "data"))
    batch = kp_dynamo.shard_batch(x, DATA)
    inside = compiled(lambda x: model(x) * 2)(x.to("xla")), wanted * 2
    held = kp_dynamo.shard(six, DATA, "fsdp")[0], x
    pairs = (run(x.to("xla")), wanted), (batch, x), (run(batch), wanted), inside, held
    return [(a.detach().cpu() - b).abs().max().item() for a, b in pairs]


@check
def programs_of_each_step() -> Any:
    """Of a user's class, for a batch that was divided, and for one that was not."""
    model, counts = kp_dynamo.shard(Wrapped(), DATA, "fsdp"), []
    run, optimizer = compiled(model), torch.optim.AdamW(model.parameters())
    for step in range(4):
        before = snapshot()["programs"]
        batch = kp_dynamo.shard_batch(tokens(step), DATA) if step < 2 else tokens(step).to("xla")
        run(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(snapshot()["programs"] - before)
    return counts


@check
def state_of_a_compiled_optimizer() -> Any:
    """What lies in another way than its parameter, for two placements of equal sizes; programs; the error."""
    model, eager = kp_dynamo.shard(small(), BOTH, {"1": "colwise", "3": "rowwise", "0": (None, "model")}), small()
    mine = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, device="xla"), eps=1e-3, capturable=True)
    theirs = torch.optim.AdamW(eager.parameters(), lr=1e-3, eps=1e-3)
    run, counts, misplaced = compiled(model), [], []

    @torch.compile(backend="kp_tpu")
    def step() -> None:
        mine.step()

    for number in range(3):
        before = snapshot()["programs"]
        for _ in range(2):  # the second adds to the gradients lazily
            run(kp_dynamo.shard_batch(tokens(number), BOTH)).pow(2).mean().backward()
            eager(tokens(number)).pow(2).mean().backward()
        step()
        theirs.step()
        counts.append(snapshot()["programs"] - before)
        for name, p in model.named_parameters():
            state = mine.state[p]
            misplaced += [(name, key) for key in ("exp_avg", "exp_avg_sq") if placed_as(state[key]) != placed_as(p)]
        mine.zero_grad()
        theirs.zero_grad()
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    return [misplaced, counts, max((a.detach().cpu() - b).abs().max().item() for a, b in pairs)]


@check
def eager_without_compile() -> Any:
    """Lazy XLA tensors, without the backend."""
    model, eager = kp_dynamo.shard(small(), DATA, "fsdp"), small()
    model(kp_dynamo.shard_batch(tokens(), DATA)).pow(2).mean().backward()
    eager(tokens()).pow(2).mean().backward()
    torch_xla.sync()
    misplaced = [name for name, p in model.named_parameters() if spec(p.grad) != spec(p)]
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    return [misplaced, max((a.grad.cpu() - b.grad).abs().max().item() for a, b in pairs)]


def _gradients(mesh: dict[str, int], sharding: Any, **options: Any) -> dict[str, torch.Tensor]:
    model = small()
    kp_dynamo.shard(model, mesh, sharding)
    run = torch.compile(model, backend="kp_tpu", options={"level": "aggressive", **options})
    run(kp_dynamo.shard_batch(tokens(), mesh)).pow(3).mean().backward()
    return {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}


@check
def gradients_summed_in_bfloat16() -> Any:
    """How far the gradients are from those that are summed in float32: divided batches, and the same on all devices."""
    found = []
    for mesh, sharding in ((DATA, "fsdp"), ({"data": 1, "model": 8}, {"1": "colwise", "3": "rowwise"})):
        exact = _gradients(mesh, sharding)
        for how in (None, "all_to_all"):
            rounded = _gradients(mesh, sharding, reduce_dtype="bfloat16", reduce_scatter=how)
            found.append({name: ((rounded[name] - g).norm() / g.norm()).item() for name, g in exact.items()})
    return found


@slow_check
def gradients_summed_by_an_exchange() -> Any:
    """Of batches that divide or not: what is divided, gradients that lie elsewhere, how far they are from eager's."""
    found = []
    for sharding, rows, options in (
        ("fsdp", 8, {}), ("fsdp", 10, {}), ("data", 8, {}),
        ("fsdp", 8, {"checkpoint": "blocks"}), ("fsdp", 8, {"buckets": [16, 32]}),
    ):  # fmt: skip
        kp_dynamo.clear_cache()
        model, eager = small(), small()
        kp_dynamo.shard(model, DATA, sharding)
        run = compiled(model, reduce_scatter="all_to_all", **options)
        divided: list[torch.Size] = []
        annotated = tensor_shardings.annotated

        def noted(tensor: torch.Tensor, sharding: Any) -> torch.Tensor:
            if sharding is not spmd.replicated():
                divided.append(tensor.shape)  # noqa: B023 - called within the iteration
            return annotated(tensor, sharding)  # noqa: B023

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensor_shardings, "annotated", noted)
            for seed in (1, 2):
                run(kp_dynamo.shard_batch(tokens(seed, rows), DATA)).pow(2).mean().backward()
                eager(tokens(seed, rows)).pow(2).mean().backward()
        pairs = zip(model.parameters(), eager.parameters(), strict=True)
        misplaced = [name for name, p in model.named_parameters() if spec(p.grad) != spec(p)]
        found.append([divided, misplaced, max((a.grad.cpu() - b.grad).abs().max().item() for a, b in pairs)])
    return found


@check
def weights_that_programs_gather() -> Any:
    """How many tensors a step makes whole, where all devices are along the batch and where they are not."""
    found = []
    for mesh, sharding in ((DATA, "fsdp"), (BOTH, {"1": "colwise", "3": "rowwise"})):
        kp_dynamo.clear_cache()
        model, eager = small(), small()
        kp_dynamo.shard(model, mesh, sharding)
        made_whole: list[torch.Size] = []
        annotated = tensor_shardings.annotated

        def noted(tensor: torch.Tensor, sharding: Any) -> torch.Tensor:
            if sharding is spmd.replicated():
                made_whole.append(tensor.shape)  # noqa: B023 - called within the iteration
            return annotated(tensor, sharding)  # noqa: B023

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensor_shardings, "annotated", noted)
            compiled(model)(kp_dynamo.shard_batch(tokens(), mesh)).pow(2).mean().backward()
        eager(tokens()).pow(2).mean().backward()
        pairs = zip(model.parameters(), eager.parameters(), strict=True)
        difference = max((a.grad.cpu() - b.grad).abs().max().item() for a, b in pairs)
        found.append([sorted(map(list, made_whole)), difference])
    return found
