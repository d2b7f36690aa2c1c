"""Run a compiled XLA program."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from kp_dynamo.compat import xla
from kp_dynamo.exceptions import TPUDeviceError
from kp_dynamo.lowering.donation import DONORS
from kp_dynamo.lowering.pending import OwnBuffers, compute
from kp_dynamo.lowering.program_inputs import Slot
from kp_dynamo.lowering.program_outputs import reader
from kp_dynamo.lowering.random_state import next_seed
from kp_dynamo.lowering.spmd import is_spmd
from kp_dynamo.lowering.trace import Trace

# Two threads may run programs on one tensor: torch_xla 2.9 changes a tensor's state without a lock at its first use.
_DISPATCH = threading.Lock()
_EVICTED = "Failed to get computation by hash"  # torch_xla 2.9's error for a program that its cache has evicted
_LOST = "while an async operation is in flight"  # its error for a buffer that an in-place update has taken

Seeds = Sequence[torch.Tensor]
_Gather = Callable[[Sequence[Any], Seeds], Sequence[Any]]


class Run(Protocol):
    """Runs a program on the arguments of its graph; random numbers come from `seeds`, or from new ones."""

    def __call__(self, args: Sequence[Any], seeds: Seeds = ()) -> list[Any]: ...


class _EvictedError(Exception):
    """torch_xla has dropped a program. `seeds` are what this run has drawn."""

    def __init__(self, seeds: Seeds) -> None:
        super().__init__(_EVICTED)
        self.seeds = seeds


def recompiled_if_evicted(run: Run, recompile: Callable[[Sequence[Any]], Run | None]) -> Run:
    """`run`, which recompiles the program if torch_xla has evicted it from its own bounded cache."""

    def recompiling(args: Sequence[Any], seeds: Seeds = ()) -> list[Any]:
        nonlocal run
        try:
            return run(args, seeds)
        except _EvictedError as error:
            drawn = error.seeds
        run = recompile(args)  # type: ignore[assignment]
        return run(args, drawn)

    return recompiling


def runner(key: bytes | None, traced: Trace) -> Run:
    """Runs the program with this key of torch_xla; None if its results need no program."""
    inputs, donation, read = traced.inputs, traced.donation, reader(traced.outputs)
    if key is None:
        return lambda args, seeds=(): read(args, [])
    gather = _gather(inputs, traced.num_draws)
    if traced.num_draws and all(slot.kind != "seed" for slot in inputs):
        gather = _drawing(gather, traced.num_draws)
    if is_spmd():
        gather = _on_device(gather)
    xlac = xla.xlac()
    needs_work, run_cached = xlac._check_tensor_need_materialization, xlac._run_cached_graph
    donated, renewed = donation.inputs, donation.renewed

    # Under SPMD a copy that is computed separately loses its sharding.
    separate = OwnBuffers().checker() if not is_spmd() else lambda _: None

    def run(args: Sequence[Any], seeds: Seeds = ()) -> list[Any]:
        values = gather(args, seeds)
        with _DISPATCH:
            separate(values)
            pending = needs_work(values)
            if True in pending:
                compute([v for v, is_pending in zip(values, pending, strict=True) if is_pending])
            if donated:
                values = list(values)
                DONORS.give(values, donated)
            results: list[Any] = _run_cached(run_cached, key, values, inputs)
        for argument, root in renewed:
            DONORS.renew(args[argument], results[root])
        return read(args, results)

    return run


def _run_cached(run_cached: Callable[..., Any], key: bytes, values: Sequence[Any], inputs: list[Slot]) -> list[Any]:
    try:
        results: list[Any] = run_cached(key, values)
    except RuntimeError as error:
        if _LOST in str(error):
            raise TPUDeviceError(_lost(error)) from error
        if _EVICTED not in str(error):
            raise
        raise _EvictedError([v for v, slot in zip(values, inputs, strict=True) if slot.kind == "seed"]) from error
    return results


def _lost(error: RuntimeError) -> str:
    reason = str(error).split("\n", 1)[0]
    return (
        f"an argument has lost its value: {reason}. torch_xla lets a copy share the buffer of its source, and the next "
        "in-place update of the source takes it. Try: torch_xla.sync() after copying tensors with clone() or "
        "load_state_dict(), and kp_dynamo.shard for the deep copy of a model that is divided."
    )


def _gather(inputs: list[Slot], num_draws: int) -> _Gather:
    """The values of a program's inputs, from the arguments of its graph and these seeds, or new ones."""
    if all(s.kind == "argument" for s in inputs):
        order = [s.value for s in inputs]
        if order == list(range(len(order))):
            return lambda args, _: args[: len(order)]
        if len(order) == 1:
            return lambda args, _: [args[order[0]]]
        pick = operator.itemgetter(*order)  # four times as fast as a list comprehension
        return lambda args, _: pick(args)

    def gather(args: Sequence[Any], seeds: Seeds) -> list[Any]:
        seed = iter(seeds).__next__ if seeds else partial(next_seed, num_draws)
        return [args[s.value] if s.kind == "argument" else seed() if s.kind == "seed" else s.value for s in inputs]

    return gather


def _drawing(gather: _Gather, num_draws: int) -> _Gather:
    """`gather` for a program whose random results nothing reads: the programs after it continue behind them."""

    def drawing(args: Sequence[Any], seeds: Seeds) -> Sequence[Any]:
        next_seed(num_draws)
        return gather(args, seeds)

    return drawing


def _on_device(gather: _Gather) -> _Gather:
    """`gather` for the virtual SPMD device, whose programs take no CPU tensors."""
    return lambda args, seeds: [v if v.device.type == "xla" else v.to(xla.device()) for v in gather(args, seeds)]
