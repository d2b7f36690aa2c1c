"""Traces a model's programs through `torch.compile`, with fake tensors or with real zeros."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from kp_dynamo.aot.fakes import Fakes
from kp_dynamo.aot.placing import StepPlacer
from kp_dynamo.aot.request import AotRequest
from kp_dynamo.compat import xla
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.exceptions import TPUBackendError, TPUModelPreparationError, XLACompilationError
from kp_dynamo.explanation.run_once import fresh_dynamo, run_backward, uncompiled
from kp_dynamo.lowering.export import Export
from kp_dynamo.lowering.fake_run import ExportedProgram, ProgramRun
from kp_dynamo.lowering.watch import watch_programs
from kp_dynamo.runtime.events import Event, Observe, ProgramReady
from kp_dynamo.session import Session

Receive = Callable[[ExportedProgram], None]


def call_on_fakes(
    request: AotRequest, receive: Receive, observe: Observe, placer: StepPlacer | None = None
) -> list[ProgramRun]:
    """Compile on fake tensors, without running; returns the runs of programs in a step and its backward.

    For several chips, `placer` places the tensors and takes the programs.
    """
    export = Export(receive, placer=placer)
    session = Session(request.options.cache_size, observe, export, with_examples=True)

    def place(model: Callable[..., Any], args: Any) -> None:
        export.own_model(model)
        if placer is not None and request.slice is not None:
            placer.add_model(model, request.slice.sharding)
            placer.add_inputs(args)

    step_on_fakes(request.model, request.args, session.as_backend(request.options), request.train, place)
    return export.finish()


def graph_texts(
    model: Callable[..., Any], args: tuple[Any, ...], options: CompileOptions, train: bool
) -> dict[str, dict[str, str]]:
    """Compile on fake tensors and return the graphs as text; the device must have been started.

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

    with fresh_dynamo(), torch.set_grad_enabled(train):
        step_on_fakes(model, args, backend, train)
    return texts


def step_on_fakes(
    model: Callable[..., Any], args: tuple[Any, ...], backend: Any, train: bool, prepare: Any = None
) -> None:
    """Call the model on fake tensors, with a backward in training; `prepare` gets them first."""
    fakes = Fakes()
    fake_model, fake_args = fakes.model(uncompiled(model)), fakes.arguments(args)
    if prepare is not None:
        prepare(fake_model, fake_args)
    with torch.random.fork_rng(devices=[]), fakes.mode:  # numbers that Python code branches on are drawn
        results = _call(_in_mode(fake_model, train), fake_args, backend)
        if train:
            run_backward(results)


def _readable(gm: fx.GraphModule) -> str:
    return str(gm.print_readable(print_output=False, include_stride=True))


def call_on_zeros(request: AotRequest, receive: Receive, observe: Observe) -> list[ProgramRun]:
    """Call the model on device tensors, with zeros for meta tensors; its programs return zeros too.

    The runs of the step are counted, but their memory is unknown: returns none.
    """
    device = xla.device()
    model, args = _on_device(uncompiled(request.model), device), _arguments_on_device(request.args, device)
    session = Session(request.options.cache_size, observe, with_examples=True)
    with watch_programs(receive):
        backend = "openxla" if request.backend == "openxla" else session.as_backend(request.options)
        results = _call(_in_mode(model, request.train), args, backend)
        if request.train:
            run_backward(results)
    return []


def _call(model: Callable[..., Any], args: tuple[Any, ...], backend: Any) -> Any:
    """Call the compiled model once; our own errors are unwrapped and torch's become XLACompilationError."""

    def call(*given: Any) -> Any:
        return model(*given)

    # Dynamo does not compile a built-in function, only Python functions that call one.
    compiled = torch.compile(model if isinstance(model, nn.Module) else call, backend=backend)
    try:
        return compiled(*args)
    except torch._dynamo.exc.BackendCompilerFailed as failure:
        inner = failure.inner_exception
        raise (inner if isinstance(inner, TPUBackendError) else _refusal(inner)) from failure
    except TPUBackendError:
        raise
    except Exception as cause:
        raise _refusal(cause) from cause


def _refusal(cause: BaseException) -> XLACompilationError:
    reason = str(cause).strip().splitlines() or [""]
    return XLACompilationError(
        f"the model cannot be traced ahead of time: {type(cause).__name__}: {reason[0]} "
        "Allowed: models whose shapes and Python branches do not depend on values of tensors (.item(), nonzero, "
        "if x.sum() > 0), except single random numbers. Try: compile the part without them, or pass the value as a "
        "number."
    )


def _in_mode(model: Callable[..., Any], train: bool) -> Callable[..., Any]:
    return model.train(train) if isinstance(model, nn.Module) else model


def _on_device(model: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    if not isinstance(model, nn.Module):
        return model
    try:
        copied = copy.deepcopy(model)
    except Exception as cause:
        raise TPUModelPreparationError(f"{type(model).__name__} cannot be copied: {cause}") from cause
    if not any(t.is_meta for t in [*copied.parameters(), *copied.buffers()]):
        return copied.to(device)
    copied = copied.to_empty(device=device)
    with torch.no_grad():
        for tensor in [*copied.parameters(), *copied.buffers()]:
            tensor.zero_()
    return copied


def _arguments_on_device(args: Any, device: torch.device) -> Any:
    def moved(tensor: torch.Tensor) -> torch.Tensor:
        there = torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
        return there.requires_grad_(tensor.requires_grad)

    return torch.utils._pytree.tree_map_only(torch.Tensor, moved, args)
