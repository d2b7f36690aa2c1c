"""Where the time of a compilation goes."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from torch import nn

from kp_dynamo.api.models import SampleInputs, checked_model, run_once
from kp_dynamo.api.xla_compiler import arguments_for, readable_errors
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.config.tpu_config import TPUConfig
from kp_dynamo.explanation.recorder import Recorder
from kp_dynamo.explanation.run_once import dynamo_seconds, fresh_dynamo
from kp_dynamo.session import Session

_numbers = itertools.count()


def time_compilation(model: nn.Module, sample_inputs: Any, config: TPUConfig) -> dict[str, float]:
    """Seconds by stage of a compilation with empty caches, torch_xla's too; see `profile_xla_compilation`.

    The model is called once, with its backward, and left unchanged.
    """
    module = checked_model(model)
    arguments, inputs = arguments_for(module, config), SampleInputs.of(sample_inputs).on_device_of(module)
    options, recorder = CompileOptions.from_dict(arguments["options"]), Recorder((), ())
    session = Session(options.cache_size, observe=recorder, salt=f"timed {next(_numbers)} ")
    how = {"fullgraph": arguments["fullgraph"], "dynamic": arguments["dynamic"]}
    with readable_errors(), fresh_dynamo():
        before, start = dynamo_seconds(), time.perf_counter()
        run_once(module, torch.compile(module, backend=session.as_backend(options), **how), inputs)
        total = time.perf_counter() - start
        stages = {"dynamo": dynamo_seconds() - before, **recorder.seconds()}
    return {**stages, "run": max(0.0, total - sum(stages.values())), "total": total}
