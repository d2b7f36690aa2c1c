"""Stages of compiling as ranges of the profiler. test_torch_trace.py has them as Chrome events."""

import re

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import kp_dynamo
from kp_dynamo.telemetry.stages import stage
from tests.spine import compiled


def test_a_stage_passes_an_error_on():
    with pytest.raises(ValueError, match="mine"), stage("passes of 1.joint"):
        raise ValueError("mine")


def test_stages_of_compiling_are_ranges_in_the_profiler():
    kp_dynamo.clear_cache()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        compiled(lambda x: (x * 3).cos().exp())(torch.ones(5))
    names = {re.sub(r"\d+", "N", event.key) for event in recorded.key_averages() if event.key.startswith("kp_tpu")}
    assert names == {
        "kp_tpu: passes of N.inference", "kp_tpu: compile N.inference", "kp_tpu: trace", "kp_tpu: xla",
        "kp_tpu::N.inference",
    }  # fmt: skip
