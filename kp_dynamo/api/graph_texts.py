"""The graphs of a model as text at three stages of compilation; the model does not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from kp_dynamo.api.models import SampleInputs, by_position
from kp_dynamo.backend import compile_in
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.explanation.run_once import run_backward
from kp_dynamo.lowering.export import Export, ExportedProgram
from kp_dynamo.runtime.events import Event, ProgramReady
from kp_dynamo.session import Session


def graph_texts(module: nn.Module, inputs: SampleInputs, options: CompileOptions) -> dict[str, dict[str, str]]:
    """Compile a copy of `module` on fake tensors, in its current mode; the device must have been started.

    Returns:
        "fx": Dynamo's graphs, by number; "aten": the graphs as they are lowered, by name ("1.forward"); "stablehlo":
        the programs, by the same names, with suffixes ".0", ".1" if CPU fallbacks split the graph.
    """
    from kp_dynamo.aot.fakes import Fakes

    texts: dict[str, dict[str, str]] = {"fx": {}, "aten": {}, "stablehlo": {}}
    new: list[ExportedProgram] = []

    def observe(event: Event) -> None:
        if isinstance(event, ProgramReady):
            texts["aten"][event.label] = _readable(event.gm)
            names = [event.label] if len(new) == 1 else [f"{event.label}.{i}" for i in range(len(new))]
            texts["stablehlo"].update((n, p.stablehlo.decode()) for n, p in zip(names, new, strict=True))
            new.clear()

    session = Session(options.cache_size, observe, Export(new.append, as_text=True))

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        texts["fx"][str(len(texts["fx"]) + 1)] = _readable(gm)
        return compile_in(session, gm, example_inputs, options)

    model, args = by_position(module, inputs)
    fakes = Fakes()
    copy, fake_args = fakes.model(model), fakes.arguments(args)
    torch._dynamo.reset()
    try:
        with fakes.mode, torch.random.fork_rng(devices=[]), torch.set_grad_enabled(module.training):
            run_backward(torch.compile(copy, backend=backend)(*fake_args))
    finally:
        torch._dynamo.reset()
    return texts


def _readable(gm: fx.GraphModule) -> str:
    return str(gm.print_readable(print_output=False, include_stride=True))
