"""Compile one XLA program; `program_run.py` runs it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from kp_dynamo.compat import chips, xla
from kp_dynamo.compat.lock import one_trace_at_a_time
from kp_dynamo.lowering.base import LoweringSpec, PortableProgram
from kp_dynamo.lowering.donation import Donation
from kp_dynamo.lowering.flash_calls import CustomCalls
from kp_dynamo.lowering.kernel_parts import kernel_parts
from kp_dynamo.lowering.placed_tensors import on_their_mesh, placing_on_mesh
from kp_dynamo.lowering.portable import NotPortableError, portable_program, portable_trace
from kp_dynamo.lowering.program_run import Run, recompiled_if_evicted, runner
from kp_dynamo.lowering.random_state import untouched_device_seed
from kp_dynamo.lowering.spmd import is_spmd
from kp_dynamo.lowering.trace import Trace, trace, without_placeholders_in_errors
from kp_dynamo.ops.flash_kernels import calling_flash
from kp_dynamo.ops.gathered import placing
from kp_dynamo.ops.optimization_barrier import barriers
from kp_dynamo.telemetry.stages import stage

logger = logging.getLogger(__name__)

# torch_xla's key of a program -> (what it computes, its matmul precision). torch_xla 2.9's keys contain neither the
# matmul precision nor the constants of some operators (alpha of elu).
_owners: dict[bytes, tuple[str, str]] = {}


class CompiledProgram(NamedTuple):
    """The result of compiling a graph.

    Attributes:
        run: Runs the program. None if XLA cannot lower some nodes.
        missing: The nodes that XLA cannot lower.
        seconds: Time spent, by stage.
        donation: The arguments whose buffers are reused for results.
        portable: See `Executable`, also for `not_portable`.
    """

    run: Run | None
    missing: list[fx.Node]
    seconds: dict[str, float]
    donation: Donation
    portable: PortableProgram | None = None
    not_portable: str = ""


@one_trace_at_a_time()
@without_placeholders_in_errors()
def compile_program(
    gm: fx.GraphModule, args: Sequence[Any], constants: dict[str, torch.Tensor], spec: LoweringSpec
) -> CompiledProgram:
    """Trace and compile `gm` for the shapes of `args`, and for their shardings under SPMD."""
    spec = replace(spec, is_sharded=is_spmd())
    mesh = on_their_mesh(args, spec.mesh)
    # AOTAutograd compiles under a fake mode, which would intercept the tensors that are created here.
    with _disable_current_modes(), settings(spec.matmul_precision), untouched_device_seed(), mesh:
        start = time.perf_counter()
        how = placing_on_mesh() if spec.is_sharded else None
        # XLA:CPU drops barriers.
        waiting = barriers(
            xla.optimization_barrier if chips.device_kind() == "TPU" else None, waits=not spec.is_sharded
        )
        with stage("trace"), waiting, calling_flash(kernels_here(spec)), placing(how):
            traced = trace(gm, args, constants, spec)
        if traced.fallbacks:
            return CompiledProgram(None, traced.fallbacks, {"trace": time.perf_counter() - start}, traced.donation)
        middle = time.perf_counter()
        with stage("xla"):
            traced, key, portable, refusal = _compile_portably(traced, args, spec)
        seconds = {"trace": middle - start, "xla": time.perf_counter() - middle}
        run = runner(key, traced)
    recompiling = recompiled_if_evicted(run, lambda args: compile_program(gm, args, constants, spec).run)
    return CompiledProgram(recompiling, [], seconds, traced.donation, portable, refusal)


def kernels_here(spec: LoweringSpec) -> CustomCalls | None:
    """The kernels of this device; None on XLA:CPU, and where tensors are divided in a way that is not ours."""
    divided = kernel_parts() if spec.is_sharded else None
    is_possible = has_kernels() and (divided is not None or not spec.is_sharded)
    return CustomCalls(divided=divided) if is_possible else None


def has_kernels() -> bool:
    """Whether the compiler of the device has Pallas kernels."""
    return chips.device_kind() == "TPU"


@one_trace_at_a_time()
@without_placeholders_in_errors()
def compile_portable(program: PortableProgram, spec: LoweringSpec) -> CompiledProgram:
    """Compile a program from its module."""
    start = time.perf_counter()
    with _disable_current_modes(), settings(spec.matmul_precision), untouched_device_seed(), stage("xla"):
        traced = portable_trace(program)
        run = runner(_compile(traced, spec), traced)
    recompiling = recompiled_if_evicted(run, lambda args: compile_portable(program, spec).run)
    return CompiledProgram(recompiling, [], {"xla": time.perf_counter() - start}, traced.donation, program)


def _compile_portably(
    traced: Trace, args: Sequence[Any], spec: LoweringSpec
) -> tuple[Trace, bytes | None, PortableProgram | None, str]:
    """Compile the program of a trace, as a module that other processes can compile if that is asked for and possible.

    Returns:
        The trace that was compiled, torch_xla's key, and `portable` and `not_portable` as in `Executable`.
    """
    refusal = ""
    if spec.is_portable:
        try:
            portable = portable_program(traced, args)
            again = portable_trace(portable)
            return again, _compile(again, spec), portable, ""
        except NotPortableError as reason:
            refusal = str(reason)
        except Exception as problem:  # noqa: BLE001 - whatever torch_xla finds wrong, the trace itself can be compiled
            logger.debug("a program has no module for other processes: %s", problem)
            refusal = "torch_xla made no module of a program"
    return traced, _compile(traced, spec), None, refusal


@contextlib.contextmanager
def settings(matmul_precision: str) -> Iterator[None]:
    """Set torch_xla's process-wide settings for tracing a graph and compiling its program."""
    from torch_xla import experimental
    from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

    xlac = xla.xlac()
    scalars, precision = xlac._get_xla_all_numbers_special_scalars(), xlac._xla_get_mat_mul_precision()
    # Numbers become constants of the program, which XLA can fold, instead of inputs.
    xlac._set_xla_all_numbers_special_scalars(True)
    xlac._xla_set_mat_mul_precision(matmul_precision)
    try:
        # Without the donor setting, warm-up and hashing disagree about a program (torch_xla 2.9).
        with experimental.eager_mode_context(False), alias_with_buffer_donor_config():
            yield
    finally:
        xlac._set_xla_all_numbers_special_scalars(scalars)
        xlac._xla_set_mat_mul_precision(precision)


def _compile(traced: Trace, spec: LoweringSpec) -> bytes | None:
    """Compile the program of a trace, and return torch_xla's key for it.

    If a different program already has that key, one more result, a number, makes the key unique.
    """
    if not traced.roots:
        return None
    owner, roots = (spec.identity, spec.matmul_precision), list(traced.roots)
    for salt in itertools.count(1):
        key: bytes = xla.xlac()._get_graph_hash(roots)
        if _owners.get(key, owner) == owner and (_is_compiled_here(roots) or key in _owners):
            _owners[key] = owner
            return key
        roots = [*traced.roots, torch.full((), float(salt), device=xla.device())]
    raise AssertionError("unreachable: the numbers do not end")


def _is_compiled_here(roots: list[torch.Tensor]) -> bool:
    """Compile the program of `roots`; False if eager code or another backend has compiled it before."""
    xlac = xla.xlac()
    compiled_before = xlac._xla_counter_value("UncachedCompile")
    # Looked up at call time: tools that watch compilation replace this entry.
    xlac._xla_warm_up_cache(roots, [])
    return bool(xlac._xla_counter_value("UncachedCompile") != compiled_before)
