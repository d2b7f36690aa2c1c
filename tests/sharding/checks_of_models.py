"""Models that are trained on eight devices as on one: `model_cases.py` has the models."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.sharding.like_one_device import against_eager, against_one_device
from tests.sharding.model_cases import MODELS
from tests.sharding.registry import CHECKS, check

CHECKS.slow |= {
    f"{name}_{how}": partial(against_one_device, name, how) for name in MODELS for how in MODELS[name].shardings
}
CHECKS.slow["llama_blocks"] = partial(against_one_device, "llama", "both", blocks="on")


@check
def a_llama_by_data_and_matmuls() -> Any:
    return against_eager("llama", "both", steps=6)[1]


@check
def a_masked_bert_by_parameters() -> Any:
    return against_eager("bert", "fsdp", steps=6)[1]
