"""What is refused."""

from __future__ import annotations

from typing import Any

import torch
import torch_xla.distributed.spmd as xs

import kp_dynamo
from tests.sharding.registry import DATA, check, small, tokens


@check
def a_mesh_of_too_few_devices() -> Any:
    return kp_dynamo.shard(small(), {"data": 4}, "data")


@check
def a_mesh_of_too_many_devices() -> Any:
    return kp_dynamo.shard_batch(tokens(), {"data": 16})


@check
def a_mesh_without_names() -> Any:
    return kp_dynamo.shard(small(), xs.Mesh(list(range(8)), (8,)), "data")


@check
def a_mesh_that_is_a_tuple() -> Any:
    return kp_dynamo.shard(small(), (4, 2), "data")


@check
def a_batch_without_its_axis() -> Any:
    return kp_dynamo.shard_batch(tokens(), {"model": 8})


@check
def a_batch_without_tensors() -> Any:
    return kp_dynamo.shard_batch({"x": 3}, DATA)


@check
def example_args_without_a_batch() -> Any:
    return kp_dynamo.shard(small(), {"data": 4, "model": 2}, "tensor", example_args=[])


@check
def an_input_on_the_cpu() -> Any:
    model = kp_dynamo.shard(small(), DATA, "fsdp")
    return torch.compile(model, backend="kp_tpu")(tokens())


@check
def a_sharding_that_is_refused() -> Any:
    """The model is as it was."""
    model = small()
    try:
        kp_dynamo.shard(model, DATA, "tensor")
    except kp_dynamo.TPUConfigurationError:
        return [{p.device.type for p in model.parameters()} == {"cpu"}, len(model._forward_pre_hooks)]


@check
def a_mesh_of_the_object_api_that_does_not_fit() -> Any:
    devices = kp_dynamo.XLADeviceManager(kp_dynamo.TPUConfig(topology="pod"))
    return kp_dynamo.XLADistributedTraining(devices, kp_dynamo.SPMDConfig((4, 4)))


@check
def no_module() -> Any:
    return kp_dynamo.shard(lambda x: x, DATA, "data")
