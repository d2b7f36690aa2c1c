"""Captures in the disk cache: AOTAutograd, the passes and the trace of an earlier process are not repeated.

A capture is stored if its key means the same in every process, and if its programs and what AOTAutograd found out can
be described by plain values. Otherwise it is compiled in every process, and a counter has the reason.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kp_dynamo.autograd.interface import Interface, callable_of
from kp_dynamo.cache.identity import Uncacheable
from kp_dynamo.cache.lasting_key import key_text
from kp_dynamo.cache.torch_tables import TorchFunctions, torch_functions
from kp_dynamo.capture.capture import with_dynamo_signature
from kp_dynamo.compat import xla
from kp_dynamo.disk_cache import capture_counts, captures
from kp_dynamo.lowering import is_spmd
from kp_dynamo.runtime.compiled_graph import CompiledGraph, Runtime
from kp_dynamo.runtime.result_shardings import ResultShardings
from kp_dynamo.runtime.stored_graph import StoredGraph, compiled_graph, lowering_spec
from kp_dynamo.session.capture_record import INFERENCE, TRAINING, CaptureRecord
from kp_dynamo.session.compile_capture import graph_contract
from kp_dynamo.session.compile_plan import CompilePlan
from kp_dynamo.session.process_parts import process_parts

logger = logging.getLogger(__name__)

# Of XLA's errors, which torch_xla raises as RuntimeError with the code in the text; as in `native/pjrt_api.h`.
_TRANSIENT = ("CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "UNAVAILABLE")


def stored_key(plan: CompilePlan, *, is_counted: bool) -> str | None:
    """The key of a capture in the disk cache; None without such a cache, and for a capture that is not stored.

    Args:
        plan: How the capture is compiled.
        is_counted: Whether to count a capture that is not stored.
    """
    if plan.capture.lasting is None:
        return None
    try:
        return _key(plan)
    except Uncacheable as reason:
        refusal = str(reason)
    except Exception as problem:  # whatever fails, such as a file that cannot be read, it can be compiled
        logger.debug("a capture has no key in the disk cache", exc_info=True)
        refusal = f"its key cannot be made ({type(problem).__name__})"
    if is_counted:
        capture_counts.count_not_stored(refusal)
    return None


def _key(plan: CompilePlan) -> str:
    """The key of a capture in the disk cache.

    Raises:
        Uncacheable: The capture is not stored.
    """
    functions = torch_functions()
    if refusal := _refusal(plan, functions):
        raise Uncacheable(refusal)
    assert plan.key is not None
    assert plan.capture.lasting is not None
    parts = (*plan.key.parts, *process_parts(plan.options), ("functions", functions.digest))
    return key_text(plan.capture.lasting.text, parts)


def _refusal(plan: CompilePlan, functions: TorchFunctions) -> str:
    """Why a capture is not stored; "" if nothing is known against it before it is compiled."""
    options, capture = plan.options, plan.capture
    assert capture.lasting is not None
    refusals = {
        "it has no key": plan.key is None,
        capture.lasting.refusal: bool(capture.lasting.refusal),
        "the option dump_dir": options.dump_dir is not None,
        "the option donate": options.donate != "off",
        "the option lowering": options.lowering != "openxla",
        "passes of the user's own": bool(options.extra_passes),
        "buckets": plan.bucketing is not None,
        "SPMD": is_spmd(),
        "several processes": xla.world()[0] > 1,
        "kernels or decompositions that were registered for torch's operators": bool(functions.replaced),
        "modes of torch that change operators": bool(
            torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
        ),
    }
    return next((reason for reason, holds in refusals.items() if holds), "")


def load_capture(key: str, plan: CompilePlan, number: int, runtime: Runtime) -> Callable[..., Any] | None:
    """A callable that runs the capture of a plan as an earlier process compiled it; None if none has, or it fails."""
    start = time.perf_counter()
    found = captures.load(key)
    if found is None:
        return None
    head, modules = found
    try:
        run = _callable(head, modules, plan, number, runtime)
    except Exception as problem:  # noqa: BLE001 - whatever is in the file, the capture can be compiled
        logger.debug("a stored capture cannot be used: %r", problem)
        if _is_transient(problem):
            capture_counts.count_miss("not_loaded")
        else:
            captures.discard(key, "not_loaded")
        return None
    capture_counts.count_loaded(time.perf_counter() - start, head["seconds"])
    return run


def _is_transient(problem: Exception) -> bool:
    """Whether loading may succeed later, or in another process: the capture is not at fault."""
    return isinstance(problem, OSError | MemoryError) or any(f"{code}:" in str(problem) for code in _TRANSIENT)


def _callable(
    head: dict[str, Any], modules: list[bytes], plan: CompilePlan, number: int, runtime: Runtime
) -> Callable[..., Any]:
    interface, names = Interface(**head["interface"]), sorted(head["graphs"])
    if names not in (INFERENCE, TRAINING):
        raise ValueError(f"a capture of the graphs {names}")
    capture, shardings = plan.capture, ResultShardings()
    compile_graph = partial(_compiled, plan=plan, number=number, runtime=runtime, shardings=shardings)
    graphs = {name: (StoredGraph(**head["graphs"][name]), module) for name, module in zip(names, modules, strict=True)}
    _require_whole(interface, [graphs[name][0] for name in names], capture.inputs)
    backward = compile_graph(*graphs["backward"]) if names == TRAINING else None
    forward = compile_graph(*graphs[names[-1]])
    captured = [node.meta.get("example_value") for node in capture.gm.graph.find_nodes(op="placeholder")]
    return with_dynamo_signature(callable_of(interface, forward, backward, capture.inputs, captured), capture)


def _require_whole(interface: Interface, graphs: list[StoredGraph], inputs: list[Any]) -> None:
    """Raise if the graphs of a capture do not fit together, or to its inputs; the key and the checksum exclude it."""
    first = graphs[-1]
    given = [(str(x.dtype).removeprefix("torch."), list(x.shape)) for x in inputs]
    num_written = len(first.spec["overwritten"])
    is_whole = (
        given == [(dtype, list(sizes)) for dtype, sizes, _ in first.inputs]
        and len(interface.inputs) == len(inputs)
        and len(first.results) == num_written + len(interface.outputs)
        and (len(graphs) == 1) == (interface.needed is None)
        and all(graph.is_whole for graph in graphs)
        and (len(graphs) > 1 or len(first.outputs) == len(first.results))
    )
    if not is_whole:
        raise ValueError("the graphs of a capture do not fit together")


def _compiled(
    graph: StoredGraph, module: bytes, *, plan: CompilePlan, number: int, runtime: Runtime, shardings: ResultShardings
) -> CompiledGraph:
    digest = hashlib.sha256(module + repr(graph).encode()).hexdigest()
    key = None if plan.conditions is None else (("stored graph", digest), *plan.conditions)
    spec = lowering_spec(graph)
    return compiled_graph(graph, module, graph_contract(plan, key, f"{number}.{spec.name}", spec, shardings), runtime)


def store_capture(key: str, record: CaptureRecord, seconds: float) -> None:
    """Write a capture that was compiled in `seconds`, unless the record has a reason not to."""
    if record.refusal:
        capture_counts.count_not_stored(record.refusal)
        return
    captures.store(key, *record.plain(), max(0.0, seconds - record.xla_s))
