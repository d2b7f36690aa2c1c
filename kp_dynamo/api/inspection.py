"""Compilations of a model with caches of their own: the time by stage, and the graphs as text. They reset Dynamo."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from kp_dynamo.aot.fakes import Fakes
from kp_dynamo.api.models import SampleInputs, run_once
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.explanation.recorder import Recorder
from kp_dynamo.explanation.run_once import dynamo_seconds, run_backward
from kp_dynamo.lowering.export import Export, ExportedProgram
from kp_dynamo.runtime.events import Event, ProgramReady
from kp_dynamo.session import Session

_numbers = itertools.count()


def time_compilation(module: nn.Module, inputs: SampleInputs, arguments: dict[str, Any]) -> dict[str, float]:
    """Compile `module` with these arguments of `torch.compile`, but with empty caches, torch_xla's too.

    The device must have been started. The module is called once, with its backward, and left unchanged.

    Returns:
        Seconds by stage: "dynamo", "aot" (AOTAutograd, partitioner and keys), "passes", "trace", "xla"; "run": the rest
        of "total", including the model's own run.
    """
    options, recorder = CompileOptions.from_dict(arguments["options"]), Recorder((), ())
    session = Session(options.cache_size, observe=recorder, salt=f"timed {next(_numbers)} ")
    how = {"fullgraph": arguments["fullgraph"], "dynamic": arguments["dynamic"]}
    with _fresh_dynamo():
        before, start = dynamo_seconds(), time.perf_counter()
        run_once(module, torch.compile(module, backend=session.as_backend(options), **how), inputs)
        total = time.perf_counter() - start
        stages = {"dynamo": dynamo_seconds() - before, **recorder.seconds()}
    return {**stages, "run": max(0.0, total - sum(stages.values())), "total": total}


def graph_texts(module: nn.Module, inputs: SampleInputs, options: CompileOptions) -> dict[str, dict[str, str]]:
    """Compile a copy of `module` on fake tensors, in its current mode; the device must have been started.

    Returns:
        "fx": Dynamo's graphs, by number; "aten": the graphs as they are lowered, by name ("1.forward"); "stablehlo":
        the programs, by the same names, with suffixes ".0", ".1" if CPU fallbacks split the graph.
    """
    texts: dict[str, dict[str, str]] = {"fx": {}, "aten": {}, "stablehlo": {}}
    new: list[ExportedProgram] = []

    def observe(event: Event) -> None:
        if isinstance(event, ProgramReady):
            texts["aten"][event.label] = _readable(event.gm)
            names = [event.label] if len(new) == 1 else [f"{event.label}.{i}" for i in range(len(new))]
            texts["stablehlo"].update((n, p.stablehlo.decode()) for n, p in zip(names, new, strict=True))
            new.clear()

    session = Session(options.cache_size, observe, Export(new.append, as_text=True))
    compile_graph = session.as_backend(options)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        texts["fx"][str(len(texts["fx"]) + 1)] = _readable(gm)
        return compile_graph(gm, example_inputs)

    model, args = inputs.by_position(module)
    fakes = Fakes()
    copy, fake_args = fakes.model(model), fakes.arguments(args)
    with _fresh_dynamo(), fakes.mode, torch.random.fork_rng(devices=[]), torch.set_grad_enabled(module.training):
        run_backward(torch.compile(copy, backend=backend)(*fake_args))
    return texts


@contextlib.contextmanager
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


def _readable(gm: fx.GraphModule) -> str:
    return str(gm.print_readable(print_output=False, include_stride=True))
