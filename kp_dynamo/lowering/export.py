"""A lowering that runs nothing: it exports a graph's programs as StableHLO for another compiler.

It traces and splits graphs as `openxla` does. Results are fake tensors in the caller's fake mode (`fake_run.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from kp_dynamo.compat import xla
from kp_dynamo.compat.lock import one_trace_at_a_time
from kp_dynamo.exceptions import XLACompilationError
from kp_dynamo.graph.source_lines import source_line
from kp_dynamo.lowering.base import Executable, LoweringSpec
from kp_dynamo.lowering.checks import check_donation, check_layouts, check_operands, check_runs_somewhere
from kp_dynamo.lowering.constants import device_constants
from kp_dynamo.lowering.fake_run import ExportedProgram, FakeRun, Placer, ProgramRun
from kp_dynamo.lowering.flash_calls import CustomCalls
from kp_dynamo.lowering.program import settings
from kp_dynamo.lowering.random_state import untouched_device_seed
from kp_dynamo.lowering.split_graph import SplitGraphInterpreter, is_xla_piece, spec_of_pieces, split_around
from kp_dynamo.lowering.step_memory import Owner, StepMemory
from kp_dynamo.lowering.trace import Trace, trace, without_placeholders_in_errors
from kp_dynamo.ops.at_true_sizes import name_of
from kp_dynamo.ops.flash_kernels import calling_flash
from kp_dynamo.ops.gathered import Placing, placing
from kp_dynamo.ops.optimization_barrier import barriers
from kp_dynamo.sharding.mesh import DATA
from kp_dynamo.sharding.placement import Placement, hlo_sharding


class Export:
    """Passes each program of a graph to `receive`, at compile time.

    Args:
        receive: Called with each program.
        as_text: Whether `stablehlo` is readable text instead of an artifact.
        placer: How tensors lie on several chips; None for one chip.
    """

    name = "export"

    def __init__(
        self, receive: Callable[[ExportedProgram], None], as_text: bool = False, placer: Placer | None = None
    ) -> None:
        self._receive, self._as_text, self._placer = receive, as_text, placer
        self._memory = StepMemory() if placer is None else StepMemory(placer.bytes_of)
        self._runs: list[ProgramRun] = []

    def placement_of(self, tensor: torch.Tensor) -> Placement | None:
        return None if self._placer is None else self._placer.placement_of(tensor)

    def own_model(self, model: Any) -> None:
        """Say which tensors are the parameters and buffers of which modules."""
        if isinstance(model, torch.nn.Module):
            named = {"parameters": model.named_parameters(), "buffers": model.named_buffers()}
            for kind, tensors in named.items():
                for name, tensor in tensors:
                    self._memory.own(tensor, Owner(kind, name.rpartition(".")[0]))

    def finish(self) -> list[ProgramRun]:
        """The runs of the step, in order; what the step holds at most is set in each program.

        Parameters and inputs are held all the time, and all of them are known only at the end of the step.
        """
        given, live = self._memory.given_bytes, self._memory.given
        runs = [ProgramRun(run.program, run.held_bytes + given, (*live, *run.live)) for run in self._runs]
        for run in runs:
            run.program.held_bytes = max(run.program.held_bytes, run.held_bytes)
        return runs

    def compile(self, gm: fx.GraphModule, args: Sequence[Any], spec: LoweringSpec) -> Executable:
        check_layouts(gm)
        check_operands(gm)
        start = time.perf_counter()
        programs: list[ExportedProgram] = []
        missing = self._export(gm, args, spec, programs)
        seconds = {"trace": time.perf_counter() - start}
        run = FakeRun(gm, programs, self._memory, self._runs)
        if self._placer is not None:
            run.place_by(self._placer, spec)
        if not missing:
            return Executable(run, num_programs=1, seconds=seconds)
        check_runs_somewhere(missing, spec)
        if self._placer is not None:
            raise XLACompilationError(
                f"{name_of(missing[0])} has no XLA lowering and would run on the CPU, which is unsupported for several "
                "chips. Try: compile for one chip, or replace the operator."
            )
        fallbacks = tuple((name_of(n), source_line(n)) for n in missing)
        return Executable(run, self._export_pieces(gm, set(missing), args, spec, programs), fallbacks, seconds)

    def _export_pieces(
        self,
        gm: fx.GraphModule,
        on_cpu: set[fx.Node],
        args: Sequence[Any],
        spec: LoweringSpec,
        programs: list[ExportedProgram],
    ) -> int:
        """Export the programs of a graph that runs some nodes on the CPU; returns the number of programs."""

        def run_piece(node: fx.Node, piece: fx.GraphModule, values: Sequence[Any]) -> Any:
            if is_xla_piece(node):
                self._export(piece, values, spec_of_pieces(spec), programs)
            return piece(*values)

        whole = split_around(gm, on_cpu)
        SplitGraphInterpreter(whole, run_piece).run(*args)
        return sum(is_xla_piece(node) for node in whole.graph.nodes)

    def _export(
        self, gm: fx.GraphModule, args: Sequence[Any], spec: LoweringSpec, programs: list[ExportedProgram]
    ) -> list[fx.Node]:
        """Trace one program, add it to `programs` and pass it to `receive`; returns the nodes that XLA cannot lower."""
        start = time.perf_counter()
        missing, stablehlo, interface = self._trace(gm, args, spec)
        if stablehlo is None:
            return missing
        calls = [n for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
        origins = {n.name: (str(n.target), source_line(n)) for n in calls}
        seconds = time.perf_counter() - start
        programs.append(ExportedProgram(spec.name, stablehlo, origins, seconds, gm, **interface))
        self._receive(programs[-1])
        return []

    @one_trace_at_a_time()
    @without_placeholders_in_errors()
    def _trace(
        self, gm: fx.GraphModule, args: Sequence[Any], spec: LoweringSpec
    ) -> tuple[list[fx.Node], bytes | None, dict[str, Any]]:
        """The nodes that XLA cannot lower, the program or None, and its fields `donated`, `inputs` and `results`."""
        with _disable_current_modes(), settings(spec.matmul_precision), untouched_device_seed():
            waits = self._placer is None
            with barriers(xla.optimization_barrier, waits=waits), _for_chips(self._placer):
                traced = trace(gm, args, device_constants(gm), spec, on_node=_name_operations)
            if traced.fallbacks or not traced.roots:
                return traced.fallbacks, None, {}
            check_donation(traced.donation.kept, args, spec)
            return [], _stablehlo(traced, self._as_text), _interface(traced)


def _interface(traced: Trace) -> dict[str, Any]:
    """The fields of a program that say what its parameters and results are."""
    first: dict[int, int] = {}
    for position, slot in enumerate(traced.outputs):
        if slot.kind in ("root", "root copy"):
            first.setdefault(slot.value, position)
    return {
        "donated": traced.donation.inputs,
        "inputs": tuple(slot.value if slot.kind == "argument" else None for slot in traced.inputs),
        "results": tuple(first[root] for root in range(len(traced.roots))),
    }


@contextmanager
def _for_chips(placer: Placer | None) -> Iterator[None]:
    """Trace kernels, gathers and sums for one chip, or for those of `placer`."""
    parts = 1 if placer is None else placer.kernel_parts
    with calling_flash(CustomCalls(parts)), placing(_placing(placer)):
        yield


def _placing(placer: Placer | None) -> Placing | None:
    if placer is None:
        return None
    mesh = placer.mesh
    return Placing(lambda x, where: _sharded(x, hlo_sharding(where, mesh, x.dim())), DATA, mesh.is_along_batch)


def _sharded(tensor: torch.Tensor, sharding: str) -> torch.Tensor:
    """A custom call that `aot/module_edits.py` makes a sharding. torch_xla 2.9 annotates no tensor without SPMD."""
    shape, dtype = [list(tensor.shape)], [tensor.dtype]
    found: torch.Tensor = xla.xlac()._xla_custom_call([tensor], "kp_sharding", shape, dtype, False, sharding, 0, {})[0]
    return found


_SEPARATOR = "|"


def node_of(op_name: str) -> str:
    """The name of the node that an operation of a compiled program came from: its key in `origins`."""
    return op_name.split(_SEPARATOR, 1)[0] if _SEPARATOR in op_name else ""


def _name_operations(node: fx.Node, result: Any) -> None:
    """Name the operations that torch_xla traced for a node after the node."""
    for value in torch.utils._pytree.tree_leaves(result):
        if isinstance(value, torch.Tensor) and value.device.type == "xla":
            # torch_xla 2.9: only new operations get the name. No public function sets it.
            xla.xlac()._set_xla_custom_op_name_prefix(value, node.name + _SEPARATOR, 0)


def _stablehlo(traced: Trace, as_text: bool) -> bytes:
    xlac = xla.xlac()
    with _operation_names():
        # torch_xla 2.9's public `save_as_stablehlo` requires a torch.export program and the real arguments.
        found = xlac._get_stablehlo(traced.roots, xlac._xla_get_default_device(), [], not as_text)
    return found.encode() if isinstance(found, str) else bytes(found)


@contextmanager
def _operation_names() -> Iterator[None]:
    """Turn on torch_xla's debug mode: torch_xla 2.9 writes the names of operations only there."""
    xlac = xla.xlac()
    was_on = xlac._get_ir_debug()
    xlac._set_ir_debug(True)
    try:
        yield
    finally:
        xlac._set_ir_debug(was_on)
