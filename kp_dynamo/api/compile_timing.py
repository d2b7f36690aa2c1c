"""Measures a cold compilation of a model, by stage."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from kp_dynamo.api.models import SampleInputs, unchanged
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.explanation.run_once import dynamo_seconds, run_backward

_numbers = itertools.count()


def time_compilation(module: nn.Module, inputs: SampleInputs, arguments: dict[str, Any]) -> dict[str, float]:
    """Compile `module` once with empty caches, bypassing torch_xla's cache too; the device must have been started.

    Dynamo is reset before and after.

    Args:
        module: It is called once, including the backward if the results have one, and left unchanged.
        inputs: Its inputs.
        arguments: Arguments of `torch.compile`; the backend is replaced by one with empty caches.

    Returns:
        Seconds by stage: "dynamo", "aot" (AOTAutograd, partitioner and keys), "passes", "trace", "xla"; "run": the rest
        of "total", including the model's own run.
    """
    from kp_dynamo.backend import compile_in
    from kp_dynamo.explanation.recorder import Recorder
    from kp_dynamo.session import Session

    options, recorder = CompileOptions.from_dict(arguments["options"]), Recorder((), ())
    session = Session(options.cache_size, observe=recorder, salt=f"timed {next(_numbers)} ")

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return compile_in(session, gm, example_inputs, options)

    torch._dynamo.reset()
    before, start = dynamo_seconds(), time.perf_counter()
    try:
        with unchanged(module):
            compiled: nn.Module = torch.compile(  # type: ignore[assignment]  # a module for a module
                module, backend=backend, fullgraph=arguments["fullgraph"], dynamic=arguments["dynamic"]
            )
            results = inputs.call(compiled)
            if torch.is_grad_enabled():
                run_backward(results)
        total = time.perf_counter() - start
        stages = {"dynamo": dynamo_seconds() - before, **recorder.seconds()}
    finally:
        torch._dynamo.reset()
    return {**stages, "run": max(0.0, total - sum(stages.values())), "total": total}
