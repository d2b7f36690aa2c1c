"""The state of the backend in one process: its caches, and the compilation of a capture with them."""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dynamo.exc import exceptions_allowed_to_be_fallback

from kp_dynamo.autograd.eager_strides import eager_results
from kp_dynamo.autograd.result_aliases import ResultAliases
from kp_dynamo.autograd.stages import GraphStages, trace_and_compile
from kp_dynamo.buckets.bucketing import Bucketing, bucketed
from kp_dynamo.buckets.resizing import is_poisoned
from kp_dynamo.buckets.sizes import Buckets
from kp_dynamo.cache.graph_key import environment_parts, graph_text
from kp_dynamo.cache.identity import Uncacheable, identity_of
from kp_dynamo.cache.key_diff import CompileKey, Parts, explain_miss
from kp_dynamo.cache.lru import LRUCache
from kp_dynamo.capture.capture import Capture, with_dynamo_signature
from kp_dynamo.capture.cpu_view import surrounding_autocast
from kp_dynamo.config.options import CompileOptions, resolve_matmul_precision
from kp_dynamo.exceptions import TPUConfigurationError, TPUDeviceError
from kp_dynamo.graph.least_memory import MemoryBudget, require_room
from kp_dynamo.hardware import memory_budget_bytes
from kp_dynamo.lowering import DONORS, Lowering, LoweringSpec, get_lowering
from kp_dynamo.pipeline import (
    Pipeline,
    build_backward_pipeline,
    build_pipeline,
    check_captured,
    prepare_graph,
    required_precision,
    run_pipeline,
)
from kp_dynamo.runtime.compiled_graph import CompiledGraph, GraphContract, Program, Runtime
from kp_dynamo.runtime.event_log import log_event
from kp_dynamo.runtime.events import CaptureReady, GraphTransformed, Observe, ignore
from kp_dynamo.runtime.placement import Placement
from kp_dynamo.runtime.result_memory import ResultMemory
from kp_dynamo.telemetry.counters import TELEMETRY
from kp_dynamo.telemetry.time_budget import time_budget

logger = logging.getLogger(__name__)


class _Plan(NamedTuple):
    """How a capture is compiled: passes on joint and inference graphs, and passes on backward graphs."""

    options: CompileOptions
    pipeline: Pipeline
    backward_pipeline: Pipeline
    conditions: Parts | None
    bucketing: Bucketing | None


class Session:
    """Caches programs by the graph they compute, and whole captures by what Dynamo captured.

    Args:
        cache_size: Maximum number of programs, and of captures.
        observe: Called with an event for every capture, transformed graph and program.
        export: A lowering that runs nothing and replaces the one in the options; graphs may then be called with fake
            tensors.
        salt: Part of the identity of every graph. A unique salt makes XLA recompile programs that torch_xla has in its
            own cache.
    """

    def __init__(
        self, cache_size: int = 100, observe: Observe = ignore, export: Lowering | None = None, salt: str = ""
    ) -> None:
        self._export, self._salt = export, salt
        self._numbers = itertools.count(1)
        self._free: list[int] = []
        self.runtime = Runtime(LRUCache(cache_size, on_evict=_forget), Placement(), observe)
        self.captures: LRUCache[CompileKey, Callable[..., Any]] = LRUCache(cache_size)

    def may_run_eagerly(self, options: CompileOptions) -> bool:
        """Whether Dynamo may fall back to eager; ahead of time it has no device to run on."""
        return self._export is None and not options.strict

    def resize(self, cache_size: int) -> None:
        """Keep at most `cache_size` programs, and as many captures."""
        self.runtime.cache.resize(cache_size)
        self.captures.resize(cache_size)

    def clear(self) -> None:
        """Drop programs, captures and copies on the device; compiled functions in use recompile when called."""
        self.captures.clear()
        self.runtime.cache.clear()
        self.runtime.placement.clear()

    def compiled(self, capture: Capture, options: CompileOptions) -> Callable[..., Any]:
        """A callable that runs `capture`: cached from an equal capture, or compiled through AOTAutograd."""
        if capture.mode == "fake" and self._export is None:
            raise TPUDeviceError(
                "the inputs are fake tensors, which have no values. Allowed: tensors on the CPU or on the XLA device. "
                "Try: kp_dynamo.aot_compile, which compiles a model for a TPU without running it."
            )
        if options.donate == "mutated" and options.lowering == "stock":
            raise TPUConfigurationError(
                "donate='mutated' is invalid with lowering='stock': torch_xla's own bridge does not report which "
                "buffers it shares. Allowed: lowering='openxla', or donate='off'."
            )
        capture, bucketing = _bucketing(capture, options)
        pipeline = build_pipeline(options, bucketing.symbols if bucketing is not None else ())
        backward_pipeline = build_backward_pipeline(options)
        conditions = _conditions(
            options, (*pipeline, *backward_pipeline), "cpu" if capture.mode == "fake" else capture.mode
        )
        plan = _Plan(options, pipeline, backward_pipeline, conditions, bucketing)
        key = None if capture.key is None or conditions is None else CompileKey((*capture.key, *conditions))
        run = self._look_up(key)
        if run is not None:
            self.runtime.observe(CaptureReady(None, key, 0.0))
            return run
        start = time.perf_counter()
        number, run = self._numbered_trace(capture, plan)
        TELEMETRY.count("aot_traces")
        if key is not None:
            self.captures.set(key, run)
        seconds = time.perf_counter() - start
        TELEMETRY.spent("aot_and_below", seconds)
        self.runtime.observe(CaptureReady(number, key, seconds))
        return run

    def _look_up(self, key: CompileKey | None) -> Callable[..., Any] | None:
        if key is None:
            return None
        others = self.captures.keys() if logger.isEnabledFor(logging.DEBUG) else []
        run = self.captures.get(key)
        if run is None and others:
            logger.debug("a new capture; nearest entry: %s", explain_miss(key, others))
        return run

    def _numbered_trace(self, capture: Capture, plan: _Plan) -> tuple[int, Callable[..., Any]]:
        """A number and a callable for the capture; the number is reused if Dynamo breaks the graph."""
        number = self._free.pop() if self._free else next(self._numbers)
        try:
            with time_budget(plan.options.compile_timeout_s, f"capture {number}"):
                return number, self._trace(capture, plan, number)
        except (AssertionError, *exceptions_allowed_to_be_fallback):
            # Dynamo breaks the graph here, and continues as if it had not been captured.
            self._free.append(number)
            raise

    def _trace(self, capture: Capture, plan: _Plan, number: int) -> Callable[..., Any]:
        options, pipeline, backward_pipeline, conditions, bucketing = plan
        precision, budget = _precision(options), _memory_budget(options)

        def transform(gm: fx.GraphModule, name: str, aliases: ResultAliases | None) -> None:
            start, label = time.perf_counter(), f"{number}.{name}"
            chosen = backward_pipeline if name == "backward" else pipeline
            if aliases is not None:  # not a backward, which is part of a joint graph
                prepare_graph(gm.graph, writes_to_inputs=aliases.has_written_inputs, on_device=capture.mode == "xla")
            if bucketing is not None and aliases is not None:
                chosen = bucketing.allowed(chosen, options.strict, aliases)
            reports = run_pipeline(gm, chosen, options, label)
            if bucketing is not None and aliases is not None:
                bucketing.decide(reports, gm)
            self.runtime.observe(GraphTransformed(label, tuple(reports), time.perf_counter() - start))

        def compile_graph(
            gm: fx.GraphModule, num_returned: int, name: str, overwritten: tuple[int | None, ...]
        ) -> CompiledGraph:
            TELEMETRY.count("graphs")
            if budget is not None:
                require_room(gm.graph, name, budget)
            text = _graph_text(gm)
            needed = required_precision(gm.graph, precision)
            donate = options.donate == "mutated"
            identity = self._salt + _identity(text)
            spec = LoweringSpec(
                name=name,
                num_returned=num_returned,
                matmul_precision=needed,
                strict=options.strict,
                identity=identity,
                overwritten=overwritten,
                donate=donate,
            )
            interface = (("graph", text), ("returned", num_returned), ("overwritten", overwritten))
            key = None if text is None or conditions is None else (*interface, *conditions)
            contract = GraphContract(key, capture.mode == "cpu", f"{number}.{name}", options.compile_timeout_s)
            lowering = self._export or get_lowering(options.lowering)
            return CompiledGraph(gm, contract, lowering, spec, self.runtime)

        if capture.mode == "xla":
            check_captured(capture.gm.graph)
        with surrounding_autocast(capture.mode):
            eager = eager_results(capture.gm)
            run = trace_and_compile(capture.gm, capture.inputs, GraphStages(transform, compile_graph, eager))
        if options.donate == "mutated" and capture.mode == "xla":
            run = _recording_donated(run)
        run = run if bucketing is None else bucketing.wrap(run)
        if capture.mode == "cpu":
            run = ResultMemory(capture.gm, eager, lays_out_all=bucketing is not None).around(run)
        return with_dynamo_signature(run, capture)


def _bucketing(capture: Capture, options: CompileOptions) -> tuple[Capture, Bucketing | None]:
    if options.buckets is None:
        return capture, None
    buckets = Buckets(options.buckets, options.over_bucket)
    poisons = is_poisoned() or (options.strict and options.dump_dir is not None)
    return bucketed(capture, buckets, poisons=poisons, strict=options.strict)


def _recording_donated(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, which then records its arguments, after AOTAutograd has copied their new values over them."""

    def recording(*args: Any) -> Any:
        results = run(*args)
        DONORS.record_donated(args)
        return results

    return recording


def _forget(_: CompileKey, program: Program) -> None:
    program.executable = None


def _memory_budget(options: CompileOptions) -> MemoryBudget | None:
    if not options.is_memory_bounded:
        return None
    chip = options.chip
    return MemoryBudget(chip, memory_budget_bytes(chip, options.memory_fraction, options.memory_budget_gb))


def _precision(options: CompileOptions) -> str:
    return resolve_matmul_precision(options.matmul_precision, torch.get_float32_matmul_precision())


def _conditions(options: CompileOptions, pipeline: Pipeline, mode: str) -> Parts | None:
    """The rest of the cache key of a program; None if a pass of the user has no stable identity."""
    try:
        # A redefined class has the same repr.
        passes = identity_of(options.extra_passes)
    except Uncacheable:
        return None
    return (
        ("options", options.key()),
        ("matmul precision", _precision(options)),
        ("pipeline", repr(pipeline)),
        ("passes of the user's own", passes),
        ("tensors on", mode),
        *environment_parts(),
    )


def _graph_text(gm: fx.GraphModule) -> Any | None:
    """The canonical text of a graph; None if it has no stable one."""
    try:
        return graph_text(gm)
    except Uncacheable:
        return None


_unnamed = itertools.count()


def _identity(text: Any | None) -> str:
    return f"number {next(_unnamed)}" if text is None else hashlib.blake2b(repr(text).encode()).hexdigest()


SESSION = Session(observe=log_event)
