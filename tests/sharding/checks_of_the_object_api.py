"""Models and optimizers of the object API."""

from __future__ import annotations

from typing import Any

import kp_dynamo
from tests.sharding.registry import check, compiled, slow_check, small, spec, tokens


@check
def models_of_the_object_api() -> Any:
    """Where a weight and the batch lie, by an `SPMDConfig`, by an argument, and on a mesh that divides no batch."""
    devices = kp_dynamo.XLADeviceManager(kp_dynamo.TPUConfig(topology="pod"))
    words, found = {"1": "colwise", "3": "rowwise"}, []
    for mesh, sharding in (
        (kp_dynamo.SPMDConfig((4, 2), sharding=words), None),
        (None, "fsdp"),
        (kp_dynamo.SPMDConfig((1, 8), sharding="data"), words),
    ):
        distributed = kp_dynamo.XLADistributedTraining(devices, mesh)
        model, x = distributed.wrap_model(small(), sharding), distributed.shard_batch(tokens())
        y = compiled(model)(x).detach().cpu()
        found.append([spec(model[1].weight), spec(x), (y - small()(tokens()).detach()).abs().max().item()])
    return found


@slow_check
def an_optimizer_of_the_object_api() -> Any:
    config = kp_dynamo.KernelPyTorchConfig()
    config.hardware.tpu.topology = "pod"
    mesh = kp_dynamo.SPMDConfig(mesh_shape=(8, 1), sharding="fsdp")
    result = kp_dynamo.TPUOptimizer(config, spmd_config=mesh).optimize(small(), tokens())
    weight = next(p for n, p in result.optimized_model.named_parameters() if n.endswith("1.weight"))
    return [spec(weight), result.performance_metrics["relative_difference"]]
