"""What is said of programs over several devices: memory, large tensors, misses."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from torch import nn

import kp_dynamo
from kp_dynamo.lowering import device_spread
from tests.sharding.registry import BOTH, DATA, check, compiled, small, tokens


@check
def memory_of_all_devices() -> Any:
    """A model that only all devices together can hold; then one that they cannot."""
    model, found = kp_dynamo.shard(small(), DATA, "fsdp"), []
    held = sum(p.nbytes for p in model.parameters())
    for budget in (held / 4, held / 16):
        run = compiled(model, memory_budget_gb=budget / 1e9)
        try:
            with torch.no_grad():
                found.append(list(run(kp_dynamo.shard_batch(tokens(), DATA)).shape))
        except torch._dynamo.exc.BackendCompilerFailed as error:
            found.append(str(error))
    return found


@check
def the_chips_of_a_program() -> Any:
    """By the mesh that tensors were placed on last."""
    found = []
    for mesh, sharding in ((DATA, "data"), (BOTH, {"1": "colwise"})):
        kp_dynamo.shard(small(), mesh, sharding)
        found.append(dataclasses.astuple(device_spread()))
    return found


@check
def a_miss_names_the_sharding() -> Any:
    """Two layers of equal sizes that are divided in other ways: the second program, and what its key differs in."""
    log, records = logging.getLogger("kp_dynamo.runtime.compiled_graph"), []
    log.setLevel(logging.DEBUG)
    log.addFilter(lambda record: records.append(record.getMessage()) or False)
    kp_dynamo.clear_cache()  # the nearest entry is that of the first layer
    with torch.no_grad():
        for words in ("colwise", "rowwise"):
            layer = kp_dynamo.shard(nn.Sequential(nn.Linear(64, 64)), BOTH, {"0": words})
            compiled(layer)(kp_dynamo.shard_batch(torch.ones(8, 64), BOTH))
    log.setLevel(logging.NOTSET)
    return records


@check
def large_tensors_that_stay_whole() -> Any:
    """Every device gets a copy of the table: 8 x 65 MiB, for the time of the check."""
    log, records = logging.getLogger("kp_dynamo.api.sharded_model"), []
    log.addFilter(lambda record: records.append(record.getMessage()) or False)
    model = nn.Sequential(nn.Embedding(130, 2**17), nn.Linear(128, 128))
    for sharding in ("data", {"1.weight": ("data", None)}):
        kp_dynamo.shard(model, DATA, sharding)
    return records


@check
def what_explain_names() -> Any:
    """With a limit of 32 KiB: the weight that is whole, and nothing that is divided; then with the real one."""
    import kp_dynamo.sharding.large_tensors as limit

    layer = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 256), nn.Linear(256, 64))
    kp_dynamo.shard(layer, {"model": 8}, {"0": "colwise", "1": "replicate", "2": "colwise"})
    x, usual, found = torch.ones(48, 64).to("xla"), limit.LARGE_BYTES, []
    for limit.LARGE_BYTES in (32 * 1024, usual):
        explanation = kp_dynamo.explain(layer, x)
        found.append([[tensor.name, list(tensor.shape), tensor.size_bytes] for tensor in explanation.whole])
        found.append("1.weight: float32[256, 64], 0 MiB" in explanation.text())
    return found
