"""The graphs of a step: nothing is lowered and nothing is compiled.

The model is called on fake tensors. Its passes see no limit of the memory, because the graphs are those of all chips
together; and a loss saves nothing that it may also compute again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from kp_dynamo.aot.request import AotRequest, Machine, request_of
from kp_dynamo.aot.trace_programs import step_on_fakes
from kp_dynamo.compat import xla
from kp_dynamo.config.options import UNLIMITED_GB
from kp_dynamo.exceptions import XLACompilationError
from kp_dynamo.explanation.run_once import fresh_dynamo
from kp_dynamo.lowering.base import Executable, LoweringSpec
from kp_dynamo.lowering.fake_run import ExportedProgram, FakeRun, GraphCall
from kp_dynamo.lowering.step_memory import StepMemory
from kp_dynamo.session import Session
from kp_dynamo.sharding.mesh import DATA, NamedMesh


@dataclass(frozen=True)
class StepGraphs:
    """The calls of graphs in one step, in order.

    Attributes:
        calls: Each with its graph and its tensors, which have no memory.
        model: The model whose parameters the calls read.
        args: The inputs that the calls read.
    """

    calls: tuple[GraphCall, ...]
    model: Any
    args: Any


def graphs_of_step(model: Any, args: Sequence[Any], options: dict[str, Any], train: bool) -> StepGraphs:
    """Take the graphs of a step.

    Args:
        model: A module, on any device.
        args: Its arguments.
        options: The options of `torch.compile`, with a checkpoint mode.
        train: With the backward.

    Raises:
        TPUConfigurationError: An invalid option.
        XLACompilationError: The model cannot be traced.
    """
    # What a pass refuses here may be too small for it in the program that is compiled.
    given = {**options, "memory_budget_gb": UNLIMITED_GB, "strict": False}
    request = request_of(model, tuple(args), Machine("v5e"), given, "kp_tpu", train)
    xla.device()
    with fresh_dynamo(), torch.inference_mode(False), torch.set_grad_enabled(train):
        return _run(request)


def _run(request: AotRequest) -> StepGraphs:
    kept: list[Any] = []
    recorder = _Recorder()
    session = Session(request.options.cache_size, lambda event: None, recorder)
    step_on_fakes(
        request.model,
        request.args,
        session.as_backend(request.options),
        request.train,
        lambda model, args: kept.extend((model, args)),
    )
    if not recorder.calls:
        raise XLACompilationError(
            "the model has no operation to compile. Allowed: a model that computes with tensors. A graph break before "
            "its first operator leaves nothing to compile."
        )
    return StepGraphs(tuple(recorder.calls), *kept)


class _Recorder:
    """A lowering that lowers nothing, and the `Placer` of its calls, which keeps them."""

    name = "export"
    kernel_parts, mesh = 1, NamedMesh.of({DATA: 1})

    def __init__(self) -> None:
        self.calls: list[GraphCall] = []
        self._memory = StepMemory()

    def compile(self, gm: fx.GraphModule, args: Sequence[Any], spec: LoweringSpec) -> Executable:
        run = FakeRun(gm, [ExportedProgram(spec.name, b"", {}, 0.0, gm)], self._memory, [])
        run.place_by(self, spec)
        return Executable(run, num_programs=1)

    def placement_of(self, tensor: torch.Tensor) -> None:
        """Nothing lies on several chips."""

    def place(self, call: GraphCall) -> tuple[Sequence[str], Sequence[str]]:
        # The caller clears the list of a call's arguments after it.
        self.calls.append(replace(call, args=tuple(call.args), results=tuple(call.results)))
        return (), ()

    def bytes_of(self, tensor: torch.Tensor) -> int:
        return int(tensor.untyped_storage().nbytes())

    def receive(self, program: ExportedProgram, placed: ExportedProgram) -> None:
        """Nothing is compiled."""
