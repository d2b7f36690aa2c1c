"""A compiled graph as AOTAutograd calls it: place the arguments, run the program, copy results back."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from kp_dynamo.cache.compile_key import CompileKey, Parts
from kp_dynamo.cache.key_diff import explain_miss
from kp_dynamo.cache.lru import LRUCache
from kp_dynamo.compat import importing
from kp_dynamo.error_boundary import translate_errors
from kp_dynamo.graph.nodes import EAGER_STRIDES
from kp_dynamo.graph.symbol_values import SymbolReader
from kp_dynamo.graph.updated_state import users_of_state
from kp_dynamo.lowering import Executable, Lowering, LoweringSpec, divide_new_state, is_spmd, shardings
from kp_dynamo.lowering.host_layout import Strides, strides_of, to_host
from kp_dynamo.runtime.events import Observe, ProgramReady, ignore
from kp_dynamo.runtime.placement import Placement
from kp_dynamo.runtime.result_shardings import ResultShardings
from kp_dynamo.telemetry import program_calls
from kp_dynamo.telemetry.counters import TELEMETRY
from kp_dynamo.telemetry.stages import stage
from kp_dynamo.telemetry.time_budget import estimate_compile_s, time_budget
from kp_dynamo.telemetry.warn_once import warn_once

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GraphContract:
    """How a graph is identified and called.

    Attributes:
        key: Identity of the graph and of all its compile settings, without the shapes of a call; None if the graph has
            no stable text and therefore shares no program.
        is_placed: Whether arguments are CPU tensors, and results go back to the CPU.
        label: Its name in logs, dumps and reports: "1.forward".
        timeout_s: Soft time limit for compiling it for one set of shapes, or None.
        result_shardings: Chooses how results lie under SPMD, for all graphs of the capture.
        resident: Positions of results that stay on the device although arguments are placed: other pieces of a divided
            graph read them.
    """

    key: Parts | None
    is_placed: bool
    label: str
    timeout_s: float | None = None
    resident: frozenset[int] = frozenset()
    result_shardings: ResultShardings = field(default_factory=ResultShardings)


_numbers = itertools.count()
_is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


class Program:
    """An entry of the compile cache. Eviction clears the executable; a graph that holds the entry recompiles."""

    __slots__ = ("executable", "key")

    def __init__(self, key: CompileKey, executable: Executable) -> None:
        self.key = key
        self.executable: Executable | None = executable


class CompiledGraph:
    """One ATen graph, with a program for each set of shapes (under SPMD, and shardings) it was called with."""

    _boxed_call = True

    def __init__(
        self,
        gm: fx.GraphModule,
        contract: GraphContract,
        lowering: Lowering,
        spec: LoweringSpec,
        runtime: Runtime,
    ) -> None:
        self._gm, self._contract, self._lowering, self._spec, self._runtime = gm, contract, lowering, spec, runtime
        self._is_placed, self._touch = contract.is_placed, runtime.cache.touch
        # A graph without a stable text is identified by a unique number.
        self._key = contract.key or (("graph", f"number {next(_numbers)}"),)
        self._programs: dict[_Variant | None, Program] = {}
        self._results = _result_values(gm)[: spec.num_returned]
        self._eager_strides: dict[int, Any] = gm.graph.output_node().meta.get(EAGER_STRIDES, {})
        self._strides: dict[_Variant | None, list[Strides]] = {}
        values = [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"]
        self._is_static = not any(_is_symbolic(v) for v in values)
        self._symbols = SymbolReader(values)
        # Under SPMD the shardings of the arguments are only known at a call.
        self._is_spmd = is_spmd()
        self._users_of_state = users_of_state(gm.graph, spec.overwritten) if self._is_spmd else {}
        self._has_one_variant = self._is_static and not self._is_spmd
        if self._has_one_variant:
            self._program(None, values)

    def __call__(self, args: list[Any]) -> list[Any]:
        with torch._C.DisableTorchFunction():  # a default device is not for the tensors that are made here
            return self._called(args)

    def _called(self, args: list[Any]) -> list[Any]:
        if importing.forked:
            importing.refuse_fork()
        variant = None if self._has_one_variant else self._variant(args)
        program = self._programs.get(variant)
        # Read once: another thread may evict the program at any time.
        executable = program.executable if program is not None else None
        if program is None or executable is None:
            program, executable = self._program(variant, args)
        self._touch(program.key)
        if program_calls.observers or _is_profiled():
            return self._run_observed(executable, args, variant)
        return self._run(executable, args, variant)

    @property
    def only_executable(self) -> Executable | None:
        """The program of a graph that has one, whatever the arguments; None if it was evicted already."""
        program = self._programs.get(None)
        return program.executable if program is not None else None

    def _run_observed(self, executable: Executable, args: list[Any], variant: _Variant | None) -> list[Any]:
        label, observers = self._contract.label, program_calls.observers
        for observer in observers:
            observer.called(label)
        try:
            if not _is_profiled():
                return self._run(executable, args, variant)
            with torch.profiler.record_function(f"kp_tpu::{label}"):
                return self._run(executable, args, variant)
        finally:
            for observer in observers:
                observer.returned(label)

    def _run(self, executable: Executable, args: list[Any], variant: _Variant | None) -> list[Any]:
        if not self._is_placed:
            results: list[Any] = executable.run(args)
            args.clear()
            return results
        strides = self._strides.get(variant)
        if strides is None:
            strides = self._strides[variant] = self._strides_in(args)
        values = [self._place(a, i in executable.donated) for i, a in enumerate(args)]
        # An argument that is saved for the backward is returned as the caller's tensor, which autograd tracks.
        own = {id(value): argument for value, argument in zip(values, args, strict=True)}
        args.clear()
        results = executable.run(values)
        count = self._spec.num_returned
        return self._moved(results[:count], strides) + [own.get(id(r), r) for r in results[count:]]

    def _moved(self, results: Sequence[Any], strides: Sequence[Strides]) -> list[Any]:
        """The results on the CPU, except those that stay on the device."""
        resident = self._contract.resident
        if not resident:
            return to_host(results, strides)
        leaving = [i for i in range(len(results)) if i not in resident]
        moved = to_host([results[i] for i in leaving], [strides[i] for i in leaving])
        by_position = dict(zip(leaving, moved, strict=True))
        return [by_position.get(i, result) for i, result in enumerate(results)]

    def _strides_in(self, args: Sequence[Any]) -> list[Strides]:
        symbols = self._symbols.read(args)
        eager = self._eager_strides
        return [strides_of(value, symbols, eager.get(i)) for i, value in enumerate(self._results)]

    def _place(self, value: Any, is_donated: bool) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return self._runtime.placement.give(value) if is_donated else self._runtime.placement.place(value)

    def _variant(self, args: Sequence[Any]) -> _Variant:
        shapes = None if self._is_static else tuple(_shape_key(a) for a in args)
        if not self._is_spmd:
            return _Variant(shapes)
        if self._users_of_state:
            divide_new_state(args, self._users_of_state)
        given = shardings(args)
        return _Variant(shapes, given, self._contract.result_shardings.choose(self._gm, self._spec, args, given))

    def _program(self, variant: _Variant | None, args: Sequence[Any]) -> tuple[Program, Executable]:
        """The program for `args`, whose variant is `variant`: that of an equal graph, or a new one."""
        key = CompileKey((*self._key, *(variant or _Variant())._asdict().items()))
        program = self._look_up(key)
        executable = program.executable if program is not None else None
        is_hit = executable is not None
        if program is None or executable is None:
            with time_budget(self._contract.timeout_s, self._contract.label):
                executable = self._compile(args, variant)
                program = Program(key, executable)
                self._runtime.cache.set(key, program)
        self._programs[variant] = program
        self._report(key, executable, is_hit)
        return program, executable

    def _report(self, key: CompileKey, executable: Executable, is_hit: bool) -> None:
        is_cacheable = self._contract.key is not None
        self._runtime.observe(ProgramReady(self._contract.label, self._gm, key, is_cacheable, is_hit, executable))

    def _look_up(self, key: CompileKey) -> Program | None:
        others = self._runtime.cache.keys() if logger.isEnabledFor(logging.DEBUG) else []
        program = self._runtime.cache.get(key)
        if program is None and others:
            logger.debug("%s not in the cache; nearest entry: %s", self._contract.label, explain_miss(key, others))
        return program

    def _compile(self, args: Sequence[Any], variant: _Variant | None) -> Executable:
        num_operators = sum(n.op == "call_function" for n in self._gm.graph.nodes)
        estimate_compile_s(num_operators, self._contract.label, self._contract.timeout_s)
        label = self._contract.label
        with translate_errors(), program_calls.compiling(label), stage(f"compile {label}"):
            spec = replace(self._spec, result_shardings=(variant and variant.result_shardings) or ())
            executable = self._lowering.compile(self._gm, args, spec)
        TELEMETRY.count("operators_compiled", num_operators)
        TELEMETRY.count("programs", executable.num_programs)
        for name, seconds in executable.seconds.items():
            TELEMETRY.spent(name, seconds)
        for op, line in executable.fallbacks:
            where = f" at {line}" if line else ""
            warn_once(
                logger, "%s%s has no XLA lowering and runs on the CPU, with a transfer each way per call", op, where
            )
        for position, reason in executable.kept:
            logger.info("%s: argument %d is not donated: %s", self._contract.label, position, reason)
        return executable


class _Variant(NamedTuple):
    """The part of a program's key that depends on the call: sizes, if they are dynamic, and shardings under SPMD."""

    shapes: tuple[object, ...] | None = None
    shardings: tuple[str, ...] | None = None
    result_shardings: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Runtime:
    """State that all compiled graphs of a process share.

    Attributes:
        with_examples: Whether the reports of passes that are observed have an example each.
    """

    cache: LRUCache[CompileKey, Program]
    placement: Placement
    observe: Observe = ignore
    with_examples: bool = False


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(s, torch.SymInt) for s in value.shape)
    return not isinstance(value, torch.Tensor)


def _shape_key(value: Any) -> object:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else (type(value), value)


def _result_values(gm: fx.GraphModule) -> list[Any]:
    """The fake tensors of a graph's results; None for a result that is not a node."""
    results = gm.graph.output_node().args[0]
    flat = results if isinstance(results, (list, tuple)) else [results]
    return [r.meta.get("val") if isinstance(r, fx.Node) else None for r in flat]
