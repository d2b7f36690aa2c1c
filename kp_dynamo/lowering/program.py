"""One compiled XLA program and how it is run."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from kp_dynamo.compat import xla
from kp_dynamo.compat.lock import one_trace_at_a_time
from kp_dynamo.lowering.base import LoweringSpec
from kp_dynamo.lowering.donation import DONORS, Donation
from kp_dynamo.lowering.flash_calls import CustomCalls
from kp_dynamo.lowering.pending import OwnBuffers, compute
from kp_dynamo.lowering.program_inputs import Slot
from kp_dynamo.lowering.random_state import next_seed, untouched_device_seed
from kp_dynamo.lowering.spmd import is_spmd
from kp_dynamo.lowering.trace import Trace, trace, without_placeholders_in_errors
from kp_dynamo.ops.flash_kernels import flash_calls
from kp_dynamo.ops.optimization_barrier import barriers

Run = Callable[[Sequence[Any]], list[Any]]

# Two threads may run programs on one tensor: torch_xla 2.9 changes its state without a lock when it is first used.
_DISPATCH = threading.Lock()
_DROPPED = "Failed to get computation by hash"  # what torch_xla 2.9 says of it
# Key of a program in torch_xla -> what it computes, and at which product precision. torch_xla 2.9 leaves the precision
# out of its keys, and the constants of some operators (alpha of elu).
_owners: dict[bytes, tuple[str, str]] = {}


class CompiledProgram(NamedTuple):
    """What comes of compiling a graph.

    Attributes:
        run: How to run it, or None where nodes that XLA cannot lower stand in the way.
        missing: These nodes.
        seconds: By stage.
        donation: The arguments whose buffers become results.
    """

    run: Run | None
    missing: list[fx.Node]
    seconds: dict[str, float]
    donation: Donation


@one_trace_at_a_time()
@without_placeholders_in_errors()
def compile_program(
    gm: fx.GraphModule, args: Sequence[Any], constants: dict[str, torch.Tensor], spec: LoweringSpec
) -> CompiledProgram:
    """Trace and compile `gm` for the shapes of `args`, and under SPMD for their shardings."""
    spec = replace(spec, is_sharded=is_spmd())
    # AOTAutograd compiles under a fake mode, which would take the tensors made here for its own.
    with _disable_current_modes(), settings(spec.matmul_precision), untouched_device_seed():
        start = time.perf_counter()
        # XLA:CPU drops barriers, and has no kernels. No XLA can share the work of a custom call among devices.
        on_tpu = xla.device_kind() == "TPU"
        kernels = CustomCalls() if on_tpu and not spec.is_sharded else None
        with barriers(xla.optimization_barrier if on_tpu else None), flash_calls(kernels):
            traced = trace(gm, args, constants, spec)
        if traced.fallbacks:
            return CompiledProgram(None, traced.fallbacks, {"trace": time.perf_counter() - start}, traced.donation)
        middle = time.perf_counter()
        key = _compile(traced, spec)
        seconds = {"trace": middle - start, "xla": time.perf_counter() - middle}
        run = _runner(key, traced.inputs, traced.outputs, traced.donation)
    lasting = _lasting(run, lambda again: compile_program(gm, again, constants, spec).run)
    return CompiledProgram(lasting, [], seconds, traced.donation)


def _lasting(run: Run, compile_again: Callable[[Sequence[Any]], Run | None]) -> Run:
    """`run`, compiled again where torch_xla has dropped the program from its own bounded cache."""

    def lasting(args: Sequence[Any]) -> list[Any]:
        nonlocal run
        try:
            return run(args)
        except RuntimeError as error:
            if _DROPPED not in str(error):
                raise
        run = compile_again(args)  # type: ignore[assignment]
        return run(args)

    return lasting


@contextlib.contextmanager
def settings(matmul_precision: str) -> Iterator[None]:
    """torch_xla's settings while a graph is traced and its program compiled."""
    from torch_xla import experimental
    from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

    xlac = xla.xlac()
    scalars, precision = xlac._get_xla_all_numbers_special_scalars(), xlac._xla_get_mat_mul_precision()
    # Numbers become part of the program, where XLA can fold them, and not inputs of it.
    xlac._set_xla_all_numbers_special_scalars(True)
    xlac._xla_set_mat_mul_precision(matmul_precision)
    try:
        # Without the donor setting, warming up and hashing disagree on a program (torch_xla 2.9).
        with experimental.eager_mode_context(False), alias_with_buffer_donor_config():
            yield
    finally:
        xlac._set_xla_all_numbers_special_scalars(scalars)
        xlac._xla_set_mat_mul_precision(precision)


def _compile(traced: Trace, spec: LoweringSpec) -> bytes | None:
    """Compile the program of a trace, and return torch_xla's key of it.

    One more result, a number, gives a program a key of its own where another one has taken the key.
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
    """Compile the program of `roots`; False where it was there, from eager code or from another backend."""
    xlac = xla.xlac()
    compiled_before = xlac._xla_counter_value("UncachedCompile")
    # Looked up at call time: tools that watch compilation replace this entry.
    xlac._xla_warm_up_cache(roots, [])
    return bool(xlac._xla_counter_value("UncachedCompile") != compiled_before)


def _runner(key: bytes | None, inputs: list[Slot], outputs: list[Slot], donation: Donation) -> Run:
    if key is None:
        return lambda args: [_output(slot, args, []) for slot in outputs]
    gather = _gather(inputs) if not is_spmd() else _on_device(_gather(inputs))
    straight = all(s.kind == "root" for s in outputs) and [s.value for s in outputs] == list(range(len(outputs)))
    xlac, count = xla.xlac(), len(outputs)
    needs_work, run_cached = xlac._check_tensor_need_materialization, xlac._run_cached_graph

    # Under SPMD a copy that is computed by itself loses its shards.
    separate = OwnBuffers().ensure if not is_spmd() else lambda _: None

    def run(args: Sequence[Any]) -> list[Any]:
        values = gather(args)
        with _DISPATCH:
            separate(values)
            pending = needs_work(values)
            if True in pending:
                compute([v for v, is_pending in zip(values, pending, strict=True) if is_pending])
            if donation.inputs:
                DONORS.give(values, donation.inputs)
            results: list[Any] = run_cached(key, values)
        for argument, root in donation.renewed:
            DONORS.renew(args[argument], results[root])
        if straight:
            return results if len(results) == count else results[:count]
        return [_output(slot, args, results) for slot in outputs]

    return run


def _gather(inputs: list[Slot]) -> Callable[[Sequence[Any]], list[Any]]:
    if all(s.kind == "argument" for s in inputs):
        order = [s.value for s in inputs]
        if order == list(range(len(order))):
            return lambda args: list(args[: len(order)])
        return lambda args: [args[i] for i in order]

    def gather(args: Sequence[Any]) -> list[Any]:
        return [args[s.value] if s.kind == "argument" else next_seed() if s.kind == "seed" else s.value for s in inputs]

    return gather


def _on_device(gather: Callable[[Sequence[Any]], list[Any]]) -> Callable[[Sequence[Any]], list[Any]]:
    """`gather` for the virtual device of SPMD, whose programs take nothing that is on the host."""
    return lambda args: [v if v.device.type == "xla" else v.to(xla.device()) for v in gather(args)]


def _output(slot: Slot, args: Sequence[Any], results: list[Any]) -> Any:
    if slot.kind == "root":
        return results[slot.value]
    if slot.kind == "argument":
        return args[slot.value]
    if slot.kind == "copy":
        return args[slot.value].clone()
    if slot.kind == "root copy":
        return results[slot.value].clone()
    # A caller may write into what it is given; the constant itself must not change.
    return slot.value.clone() if slot.kind == "constant" else slot.value
