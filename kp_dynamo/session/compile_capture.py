"""Compile one capture: AOTAutograd traces it, the passes edit its graphs, and each graph gets its programs."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from kp_dynamo.autograd.eager_strides import eager_results
from kp_dynamo.autograd.interface import Differentiated
from kp_dynamo.autograd.result_aliases import ResultAliases
from kp_dynamo.autograd.stages import GraphStages, trace_and_compile
from kp_dynamo.cache.compile_key import Parts
from kp_dynamo.cache.graph_text import graph_text
from kp_dynamo.cache.identity import Uncacheable
from kp_dynamo.capture.capture import with_dynamo_signature
from kp_dynamo.capture.cpu_view import surrounding_autocast
from kp_dynamo.graph.least_memory import require_room
from kp_dynamo.ledger import Ledger
from kp_dynamo.lowering import DONORS, Lowering, LoweringSpec, current_mesh
from kp_dynamo.pipeline import (
    dump_key,
    refuse_places_of_inputs,
    required_precision,
    resolve_memory_places,
    run_pipeline,
)
from kp_dynamo.runtime.compiled_graph import CompiledGraph, GraphContract, Runtime
from kp_dynamo.runtime.events import GraphTransformed
from kp_dynamo.runtime.result_memory import ResultMemory
from kp_dynamo.runtime.result_shardings import ResultShardings
from kp_dynamo.session.capture_record import CaptureRecord
from kp_dynamo.session.compile_plan import CompilePlan, matmul_precision
from kp_dynamo.session.logits_gradient import separated_logits, with_gradient_of
from kp_dynamo.telemetry.counters import TELEMETRY

_unnamed = itertools.count()


class CaptureCompiler:
    """Compiles the capture of a plan.

    Args:
        plan: The capture, and how it is compiled.
        number: The number of the capture; its graphs are named "<number>.forward" and so on.
        runtime: State that the compiled graphs share.
        lowering: Compiles a graph.
        salt: Part of the identity of every graph.
        compile_later: `torch.compile` with this backend, for a graph that few calls run.
        record: Notes what another process needs to run the capture; None if it is not stored.
    """

    def __init__(
        self,
        plan: CompilePlan,
        number: int,
        runtime: Runtime,
        lowering: Lowering,
        salt: str,
        compile_later: Callable[[fx.GraphModule], Callable[..., Any]],
        record: CaptureRecord | None = None,
    ) -> None:
        self._record = record
        self._plan, self._number, self._runtime, self._lowering = plan, number, runtime, lowering
        self._salt, self._compile_later = salt, compile_later
        self._result_shardings = ResultShardings()
        self._ledger: Ledger | None = None
        # All belong to the time at which Dynamo calls the backend, not to that of a later backward.
        self._precision, self._budget = matmul_precision(plan.options), plan.memory_budget
        self._mesh = current_mesh()

    def compile(self) -> Callable[..., Any]:
        """A callable with Dynamo's calling convention that runs the capture."""
        if not self._plan.options.ledger:
            return self._compiled()
        # Before a stage edits the graph, which the ledger runs eagerly.
        self._ledger = _ledger_of(self._plan)
        # What compiles a backward later would keep them alive.
        self._plan = replace(self._plan, capture=replace(self._plan.capture, values=None))
        try:
            return self._compiled()
        finally:
            self._ledger.close()

    def _compiled(self) -> Callable[..., Any]:
        capture, bucketing = self._plan.capture, self._plan.bucketing
        if capture.mode == "xla":
            refuse_places_of_inputs(capture.gm.graph)
        with surrounding_autocast(capture.gm, capture.mode):
            eager = eager_results(capture.gm)
            logits = separated_logits(self._plan)
            traced = eager if logits is None else eager_results(capture.gm)
            stages = GraphStages(self._transform, self._compile_graph, traced, self._note)
            run = trace_and_compile(capture.gm, capture.inputs, stages)
        run = run if logits is None else with_gradient_of(logits, run, capture.mode, self._compile_later)
        if self._plan.options.donate == "mutated" and capture.mode == "xla":
            run = _recording_donated(run)
        run = run if bucketing is None or capture.passed is not None else bucketing.wrap(run)
        if self._record is not None and logits is not None:
            self._record.refuse("the gradient of its logits is separate")
        if capture.passed is not None:
            return with_dynamo_signature(run, capture)
        lays_out_all = bucketing is not None and capture.mode == "cpu"
        memory = ResultMemory(capture.gm, eager, lays_out_all=lays_out_all)
        if self._record is not None and memory.is_needed:
            self._record.refuse("its results share memory")
        return with_dynamo_signature(run, capture, memory.around)

    def _note(self, differentiated: Differentiated) -> None:
        if self._record is not None:
            self._record.note(differentiated)

    def _transform(self, gm: fx.GraphModule, name: str, aliases: ResultAliases | None) -> None:
        """Run the passes on a graph; `aliases` is None for a backward, which is a part of a joint graph."""
        plan, start, label = self._plan, time.perf_counter(), f"{self._number}.{name}"
        chosen = plan.backward_pipeline if name == "backward" else plan.pipeline
        if aliases is not None:
            is_on_device = plan.capture.mode == "xla"
            resolve_memory_places(gm.graph, writes_to_inputs=aliases.has_written_inputs, on_device=is_on_device)
        bucketing = plan.bucketing if aliases is not None else None
        if bucketing is not None and aliases is not None:
            chosen = bucketing.allowed(chosen, aliases)
        ledger = None if self._ledger is None else self._ledger.of_graph(gm, name)
        with_examples = self._runtime.with_examples
        reports = run_pipeline(gm, chosen, plan.options, label, ledger, with_examples=with_examples)
        if bucketing is not None:
            bucketing.decide(reports, gm)
        self._runtime.observe(GraphTransformed(label, tuple(reports), time.perf_counter() - start))

    def _compile_graph(
        self, gm: fx.GraphModule, num_returned: int, name: str, overwritten: tuple[int | None, ...]
    ) -> CompiledGraph:
        TELEMETRY.count("graphs")
        if self._budget is not None:
            require_room(gm.graph, name, self._budget)
        options, conditions, text = self._plan.options, self._plan.conditions, _graph_text(gm)
        spec = LoweringSpec(
            name=name,
            num_returned=num_returned,
            matmul_precision=required_precision(gm.graph, self._precision),
            strict=options.strict,
            identity=self._salt + _identity(text),
            overwritten=overwritten,
            donate=options.donate == "mutated",
            is_portable=self._record is not None,
            mesh=self._mesh,
        )
        interface = (
            ("graph", text),
            ("returned", num_returned),
            ("overwritten", overwritten),
            *((("portable", True),) if spec.is_portable else ()),
        )
        key = None if text is None or conditions is None else (*interface, *conditions)
        dump_key(key, options, f"{self._number}.{name}")
        contract = graph_contract(self._plan, key, f"{self._number}.{name}", spec, self._result_shardings)
        graph = CompiledGraph(gm, contract, self._lowering, spec, self._runtime)
        if self._record is not None:
            self._record.add(name, gm, spec, graph.only_executable)
        return graph


def graph_contract(
    plan: CompilePlan, key: Parts | None, label: str, spec: LoweringSpec, shardings: ResultShardings
) -> GraphContract:
    """How a graph of the capture of a plan is called."""
    timeout_s, is_placed = plan.options.compile_timeout_s, plan.capture.mode == "cpu"
    return GraphContract(key, is_placed, label, timeout_s, _resident(plan, spec), shardings)


def _resident(plan: CompilePlan, spec: LoweringSpec) -> frozenset[int]:
    """The results of a piece that stay on the device.

    A new value of an input that the piece writes to is copied into the caller's tensor.
    """
    stays = plan.capture.stays_on_device
    return frozenset(range(len(spec.overwritten), spec.num_returned)) if stays else frozenset()


def _ledger_of(plan: CompilePlan) -> Ledger:
    capture = plan.capture
    may_narrow = plan.options.precision == "bfloat16"
    trains = capture.records_gradients
    return Ledger(capture.gm, capture.inputs, capture.values, trains=trains, may_narrow=may_narrow)


def _recording_donated(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, which then records its arguments, after AOTAutograd has copied their new values over them."""

    def recording(*args: Any) -> Any:
        results = run(*args)
        DONORS.record_donated(args)
        return results

    return recording


def _graph_text(gm: fx.GraphModule) -> Any | None:
    """The canonical text of a graph; None if it has no stable one."""
    try:
        return graph_text(gm)
    except Uncacheable:
        return None


def _identity(text: Any | None) -> str:
    return f"number {next(_unnamed)}" if text is None else hashlib.blake2b(repr(text).encode()).hexdigest()
