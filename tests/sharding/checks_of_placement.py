"""Where parameters, batches and results lie."""

from __future__ import annotations

import copy
import unittest.mock
from typing import Any

import torch
import torch_xla.distributed.spmd as xs
from torch import nn

import kp_dynamo
from kp_dynamo.lowering import program
from kp_dynamo.lowering.placed_tensors import current_mesh
from kp_dynamo.sharding.mesh import NamedMesh
from kp_dynamo.sharding.placement import hlo_sharding, shard_shape
from tests.sharding.registry import BOTH, DATA, check, compiled, placed_as, slow_check, small, spec, tokens


@check
def what_each_device_holds() -> Any:
    """Of the parameters after `shard`, as torch_xla's public wrapper tells it."""
    model = kp_dynamo.shard(
        small(), BOTH, {"1.weight": ("model", "data"), "3.weight": ("data", "model"), "1.bias": ("model",)}
    )
    expected, mesh = small(), NamedMesh.of(BOTH)
    rules = {"1.weight": ("model", "data"), "3.weight": ("data", "model"), "1.bias": ("model",)}
    shapes, equal = {}, []
    for name, parameter in model.named_parameters():
        shards = xs.XLAShardedTensor(parameter).local_shards
        shapes[name] = sorted({tuple(shard.data.shape) for shard in shards})
        whole = dict(expected.named_parameters())[name].detach()
        equal += [torch.equal(shard.data, whole[shard.indices]) for shard in shards]
        assert shapes[name] == [shard_shape(whole.shape, rules.get(name, ()), mesh)], name
    return [shapes["1.weight"], shapes["0.weight"], all(equal), len(equal)]


@check
def a_batch_in_parts() -> Any:
    sent = kp_dynamo.shard_batch({"x": tokens(), "y": [torch.arange(8.0), torch.ones(3)]}, {"model": 2, "data": 4})
    return [spec(sent["x"]), spec(sent["y"][0]), spec(sent["y"][1]), torch.equal(sent["x"].cpu(), tokens())]


@check
def a_mesh_of_torch_xla() -> Any:
    ids = [7, 6, 5, 4, 3, 2, 1, 0]
    mesh = xs.Mesh(ids, (4, 2), ("data", "model"))
    model = kp_dynamo.shard(small(), mesh, {"1": "colwise", "3": "rowwise"})
    x = kp_dynamo.shard_batch(tokens(), mesh)
    y = compiled(model)(tokens().to("xla"))
    return [spec(model[1].weight), spec(x), (y.detach().cpu() - small()(tokens()).detach()).abs().max().item()]


@check
def two_models_on_two_meshes() -> Any:
    """Each is compiled for its own mesh, whichever came last; also a backward that is compiled after the other one."""
    teacher, student, eager, meshes = small(), small(), small(), []
    stock = program.placing_on_mesh

    def recorded() -> Any:
        meshes.append(str(current_mesh()))
        return stock()

    eager(tokens()).square().mean().backward()
    kp_dynamo.shard(teacher, BOTH, "fsdp+tensor", example_args=(tokens(),))
    with unittest.mock.patch.object(program, "placing_on_mesh", recorded):
        result = compiled(teacher)(tokens().to("xla"))
        kp_dynamo.shard(student, DATA, "fsdp")
        result.square().mean().backward()
        compiled(student)(tokens().to("xla")).square().mean().backward()
        with torch.no_grad():
            compiled(teacher)(tokens().to("xla"))
    pairs = [zip(m.parameters(), eager.parameters(), strict=True) for m in (teacher, student)]
    return [*meshes, *(max((a.grad.cpu() - b.grad).abs().max().item() for a, b in found) for found in pairs)]


@check
def two_meshes_of_equal_sizes() -> Any:
    """A backward that reads no parameter is compiled for the mesh of its forward, not for the last one."""
    model, eager, x = nn.Sequential(nn.Linear(64, 256, bias=False)), nn.Linear(64, 256, bias=False), torch.randn(64, 64)
    eager.load_state_dict(model[0].state_dict())
    kp_dynamo.shard(model, BOTH, {"0.weight": ("model", "data")})
    other = nn.Sequential(nn.Linear(64, 256, bias=False))
    kp_dynamo.shard(other, {"data": 4, "expert": 2}, {"0.weight": ("expert", None)})
    compiled(model)(x.to("xla")).square().mean().backward()
    eager(x).square().mean().backward()
    return (model[0].weight.grad.cpu() - eager.weight.grad).abs().max().item()


@check
def states_that_are_loaded() -> Any:
    """What lies elsewhere after `load_state_dict` of tensors on the device, into the model and a child; the error."""
    model, loaded = kp_dynamo.shard(small(), DATA, "fsdp"), small()
    before = {name: spec(p) for name, p in model.named_parameters()}
    nn.init.ones_(loaded[3].weight)
    state = {name: value.to("xla") for name, value in loaded.state_dict().items()}
    model.load_state_dict(state)
    model[1].load_state_dict({name: state[f"1.{name}"] for name in ("weight", "bias")})
    moved = [name for name, p in model.named_parameters() if placed_as(p) != (before[name] or "{replicated}")]
    pairs = zip(model.parameters(), loaded.parameters(), strict=True)
    return [moved, max((a.detach().cpu() - b.detach()).abs().max().item() for a, b in pairs)]


@check
def sharded_otherwise_on_the_same_mesh() -> Any:
    """Dynamo captures the model again: no guard sees how parameters lie."""
    model, seen = kp_dynamo.shard(small(), BOTH, {"1": "colwise", "3": "rowwise"}), []

    def backend(gm: Any, inputs: Any) -> Any:
        seen.append(gm)
        return gm.forward

    run = torch.compile(model, backend=backend)
    for sharding in (None, {"1": "rowwise", "3": "colwise"}):
        if sharding is not None:
            kp_dynamo.shard(model, BOTH, sharding)
        run(tokens().to("xla"))
    return len(seen)


@slow_check
def sharded_again() -> Any:
    """Another sharding of the same model, after it was trained."""
    model, eager = kp_dynamo.shard(small(), DATA, "fsdp"), small()
    found = [spec(model[1].weight)]
    words = {"1": "colwise", "3": "rowwise"}
    for mesh, sharding in ((DATA, "fsdp"), (BOTH, words), ({"model": 8}, words), (DATA, "data")):
        kp_dynamo.shard(model, mesh, sharding)  # from the second time on, the optimizer's update is pending
        found.append(spec(model[1].weight))
        mine, theirs = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(eager.parameters(), lr=0.1)
        for run, optimizer, device in ((compiled(model), mine, "xla"), (eager, theirs, "cpu")):
            optimizer.zero_grad()
            run(tokens().to(device)).pow(2).mean().backward()
            optimizer.step()
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    return [*found, max((a.detach().cpu() - b.detach()).abs().max().item() for a, b in pairs)]


@check
def results_of_inference() -> Any:
    """On "fsdp" the result lies along the batch, and so does what a piece passes on."""
    model, eager = small(), small()
    kp_dynamo.shard(model, DATA, "fsdp")
    with torch.no_grad():
        run, results = compiled(model), []
        for rows in (8, 16, 6):
            result = run(kp_dynamo.shard_batch(tokens(rows=rows), DATA))
            results.append([spec(result), (result.cpu() - eager(tokens(rows=rows))).abs().max().item()])
    return results


@check
def batch_norm() -> Any:
    """Its statistics are those of the whole batch, and stay whole."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    mine = kp_dynamo.shard(copy.deepcopy(eager), DATA, "data")
    run, x = compiled(mine), torch.randn(8, 16)
    difference = max((run(x.to("xla")).cpu() - eager(x)).abs().max().item() for _ in range(2))
    buffers = zip(mine.buffers(), eager.buffers(), strict=True)
    return [difference, max((a.cpu() - b).abs().max().item() for a, b in buffers), [spec(b) for b in mine.buffers()]]


@check
def the_devices_of_the_notation() -> Any:
    """torch_xla writes a placement as we do."""
    from kp_dynamo.lowering.placed_tensors import place

    mesh, found = NamedMesh.of({"data": 2, "model": 2, "expert": 2}), []
    for placement in (
        ("data", "model"), ("model", "data"), (None, "expert"), (("model", "data"), None), (None, ("expert", "data")),
        ("expert", ("data", "model")), (None, None), (("expert", "model", "data"), None),
    ):  # fmt: skip
        tensor = torch.arange(64.0).reshape(8, 8).to("xla")
        place(tensor, placement, mesh)
        result = tensor.cpu()
        found.append(
            [spec(tensor), hlo_sharding(placement, mesh, 2), torch.equal(result, torch.arange(64.0).reshape(8, 8))]
        )
    return found
