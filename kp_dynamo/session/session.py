"""A session caches programs by the graph they compute, and whole captures by what Dynamo captured."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._dynamo.exc import exceptions_allowed_to_be_fallback

from kp_dynamo.blocks.block_calls import BlockGroup, bound_call, group_of, program_key
from kp_dynamo.blocks.call_changes import require_no_changes
from kp_dynamo.blocks.call_division import block_calls, drop_followed_calls
from kp_dynamo.blocks.division import Division, Piece, Undivided
from kp_dynamo.cache.compile_key import CompileKey
from kp_dynamo.cache.key_diff import explain_miss
from kp_dynamo.cache.lru import LRUCache
from kp_dynamo.capture.capture import Capture, read_capture
from kp_dynamo.capture.cpu_view import restore_autocast
from kp_dynamo.compat import (
    chips,
    device_errors,
    given_up_frames,
    logging_calls,
    padded_encoders,
    recurrent_modules,
)
from kp_dynamo.compat.dynamo_trace import RestartTrace
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.disk_cache.captures import folder as disk_folder
from kp_dynamo.error_boundary import translate_errors
from kp_dynamo.exceptions import TPUDeviceError
from kp_dynamo.graph.operand_devices import problem_of_devices, python_text
from kp_dynamo.graph.step_share import WHOLE, StepShare
from kp_dynamo.lowering import Lowering, device_spread, get_lowering, on_their_mesh
from kp_dynamo.runtime.compiled_graph import Program, Runtime
from kp_dynamo.runtime.event_log import log_event
from kp_dynamo.runtime.events import CaptureDivided, CaptureReady, Observe, ignore
from kp_dynamo.runtime.placement import Placement
from kp_dynamo.session.capture_record import CaptureRecord
from kp_dynamo.session.compile_capture import CaptureCompiler
from kp_dynamo.session.compile_plan import CompilePlan, plan_for
from kp_dynamo.session.divide_capture import divided_at_calls, division_of, report_whole
from kp_dynamo.session.join_pieces import joined, runs_of, shares_of
from kp_dynamo.session.padded_pieces import padded_pieces
from kp_dynamo.session.piece_values import with_values
from kp_dynamo.session.stored_captures import load_capture, store_capture, stored_key
from kp_dynamo.telemetry import log
from kp_dynamo.telemetry.counters import TELEMETRY
from kp_dynamo.telemetry.time_budget import time_budget
from kp_dynamo.uncompiled_frames import report_as

logger = logging.getLogger(__name__)


class Session:
    """The caches of the backend, and what compiles with them.

    Args:
        cache_size: Maximum number of programs, and of captures.
        observe: Called with an event for every capture, transformed graph and program.
        export: A lowering that runs nothing and replaces the one in the options; graphs may then be called with fake
            tensors.
        salt: Part of the identity of every graph. A unique salt makes XLA recompile programs that torch_xla has in its
            own cache.
        with_examples: Whether the observer wants an example of what each pass did.
        keeps_captures: Whether captures are stored in the disk cache, if there is one, and loaded from it. If not,
            their programs are still those of stored captures.
    """

    def __init__(
        self,
        cache_size: int = 100,
        observe: Observe = ignore,
        export: Lowering | None = None,
        salt: str = "",
        *,
        with_examples: bool = False,
        keeps_captures: bool = False,
    ) -> None:
        self._keeps_captures = keeps_captures
        self._export, self._salt = export, salt
        self._numbers = itertools.count(1)
        self._free: list[int] = []
        self.runtime = Runtime(LRUCache(cache_size, on_evict=_forget), Placement(), observe, with_examples)
        self.captures: LRUCache[CompileKey, Callable[..., Any]] = LRUCache(cache_size)
        self._models: WeakKeyDictionary[object, LRUCache[Any, Any]] = WeakKeyDictionary()

    def resize(self, cache_size: int) -> None:
        """Keep at most `cache_size` programs, and as many captures."""
        self.runtime.cache.resize(cache_size)
        self.captures.resize(cache_size)

    def models_of(self, owner: object, cache_size: int) -> LRUCache[Any, Any]:
        """The models that `owner` compiled, at most `cache_size`; dropped with the owner, which they must not hold."""
        models = self._models.setdefault(owner, LRUCache(cache_size))
        models.resize(cache_size)
        return models

    def clear(self) -> None:
        """Drop models, programs, captures and copies on the device; compiled functions in use recompile when called."""
        for models in list(self._models.values()):
            models.clear()
        self.captures.clear()
        self.runtime.cache.clear()
        self.runtime.placement.clear()

    def as_backend(
        self, options: CompileOptions, group: BlockGroup | None = None
    ) -> Callable[[fx.GraphModule, Sequence[Any]], Any]:
        """A `torch.compile` backend that compiles with these caches; the device must have been started.

        Args:
            options: How to compile.
            group: The child modules whose forward is compiled, if they are called from a compiled model.
        """

        def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
            log.configure()  # for every graph, because torch._logging.set_logs undoes it
            # Ahead of time there is no device on which Dynamo could run the graph eagerly.
            may_run_eagerly = self._export is None and not options.strict
            mine = example_inputs if self._export is None else ()
            with translate_errors(gm, breaks_graphs=may_run_eagerly), on_their_mesh(mine):
                if group is not None:
                    require_no_changes(group.name)
                chosen = options.on(chips.chip_name())
                if self._export is None:
                    chosen = chosen.over(device_spread())
                drop_followed_calls(gm)
                calls = block_calls(gm.graph)
                lowering = self._export or get_lowering(chosen.lowering)
                capture = read_capture(
                    gm,
                    example_inputs,
                    with_modules=chosen.reads_modules,
                    with_values=chosen.ledger,
                    placement_of=lowering.placement_of,
                    lasting=self._export is None and not self._salt and disk_folder() is not None,
                )
                compiled = self._around_calls(capture, chosen) if calls else self._compiled(capture, chosen)
            if compiled is None:
                raise RestartTrace("calls of child modules cannot be compiled by themselves")
            return torch._dynamo.disable(compiled, reason="a compiled graph")

        backend.takes_block_calls = self._export is None  # type: ignore[attr-defined]  # block_calls.choose asks
        logging_calls.install()
        backend.moves_log_calls = True  # type: ignore[attr-defined]  # compat.logging_calls asks
        recurrent_modules.install()
        backend.traces_recurrent = True  # type: ignore[attr-defined]  # compat.recurrent_modules asks
        padded_encoders.install()
        backend.traces_padded_encoders = True  # type: ignore[attr-defined]  # compat.padded_encoders asks
        device_errors.install()
        backend.explain_devices = problem_of_devices  # type: ignore[attr-defined]  # compat.device_errors asks
        given_up_frames.install()
        backend.on_given_up = partial(report_as, strict=options.strict)  # type: ignore[attr-defined]
        return backend

    def _around_calls(self, capture: Capture, options: CompileOptions) -> Callable[..., Any] | None:
        """A callable that runs a capture with calls of child modules; None if Dynamo must follow all of them."""
        plan = plan_for(capture, options)
        division = divided_at_calls(plan)
        compiled = self._joined(division, capture, plan) if isinstance(division, Division) else division
        if not isinstance(compiled, Undivided):
            return compiled
        for call in block_calls(capture.gm.graph):
            group_of(call).refusal = compiled.reason
        return None

    def _called(self, piece: Piece, options: CompileOptions) -> Callable[..., Any]:
        """A callable that runs a piece that is a call of a child module, compiled when it is first called."""
        assert piece.call is not None
        group = group_of(piece.call)

        # The key has the sizes. dynamic=False would change the configuration of all threads at every call.
        dynamic = False if group.is_asked_for else None
        # blocks="on" asks for the division around the calls.
        inside = options.with_values(blocks="auto") if options.blocks == "on" and not group.is_asked_for else options

        def compile_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(forward, backend=self.as_backend(inside, group), dynamic=dynamic)

        run = group.compiled_for(self, (options, program_key(piece.call)), compile_forward)
        (call,) = block_calls(piece.capture.gm.graph)
        call.target = bound_call(piece.call, run)
        restore_autocast(piece.capture.gm, piece.capture.mode)
        piece.capture.gm.recompile()
        return piece.capture.gm

    def _compiled(self, capture: Capture, options: CompileOptions) -> Callable[..., Any]:
        """A callable that runs `capture`."""
        return self._numbered(capture, options)[1]

    def _numbered(
        self, capture: Capture, options: CompileOptions, share: StepShare = WHOLE
    ) -> tuple[int | None, Callable[..., Any]]:
        """The number of a capture and a callable that runs it; no number if it is cached from an equal capture."""
        if capture.mode == "fake" and self._export is None:
            raise TPUDeviceError(
                "the inputs are fake tensors, which have no values. Allowed: tensors on the CPU or on the XLA device. "
                "Try: kp_dynamo.aot_compile, which compiles a model for a TPU without running it."
            )
        return self._planned(plan_for(capture, options, share), capture)

    def _planned(self, plan: CompilePlan, capture: Capture) -> tuple[int | None, Callable[..., Any]]:
        """As `_numbered`, for `capture` as it is compiled by a plan."""
        key = plan.key
        run = self._look_up(key)
        if run is not None:
            self.runtime.observe(CaptureReady(None, key, 0.0, _input_names(capture)))
            return None, run
        start = time.perf_counter()
        division = division_of(plan, capture)
        divided = self._joined(division, capture, plan) if isinstance(division, Division) else division
        if divided is not None and not isinstance(divided, Undivided):
            if key is not None:
                self.captures.set(key, divided)
            return None, divided
        if divided is not None:
            self.runtime.observe(CaptureDivided((), divided.reason))
        names = _input_names(capture)
        number, run, is_loaded = self._load_or_compile(plan)
        TELEMETRY.count("aot_traces", 0 if is_loaded else 1)
        if key is not None:
            self.captures.set(key, run)
        seconds = time.perf_counter() - start
        TELEMETRY.spent("aot_and_below", seconds)
        self.runtime.observe(CaptureReady(number, key, seconds, names, is_loaded))
        return number, run

    def _joined(self, division: Division, capture: Capture, plan: CompilePlan) -> Callable[..., Any] | Undivided:
        """A callable that runs the pieces of a capture, each compiled, or cached from an equal piece."""
        if plan.options.ledger:
            division = with_values(division, capture)
        shares = shares_of(division, capture, plan)
        plans = [plan_for(p.capture, plan.options, s) for p, s in zip(division.pieces, shares, strict=True)]
        compiled = [
            self._planned(own, piece.capture) if piece.call is None else (None, self._called(piece, plan.options))
            for own, piece in zip(plans, division.pieces, strict=True)
        ]
        padding = padded_pieces(division, plan.bucketing, [own.bucketing for own in plans])
        if isinstance(padding, Undivided):
            report_whole(padding, plan.options)
            return padding
        self.runtime.observe(CaptureDivided(runs_of(division, [number for number, _ in compiled]), ""))
        return joined(division, capture, [run for _, run in compiled], padding)

    def _look_up(self, key: CompileKey | None) -> Callable[..., Any] | None:
        if key is None:
            return None
        others = self.captures.keys() if logger.isEnabledFor(logging.DEBUG) else []
        run = self.captures.get(key)
        if run is None and others:
            logger.debug("a new capture; nearest entry: %s", explain_miss(key, others))
        return run

    def _load_or_compile(self, plan: CompilePlan) -> tuple[int, Callable[..., Any], bool]:
        """A number and a callable for the capture, and whether the disk cache had it.

        The number is reused if Dynamo breaks the graph.
        """
        number = self._free.pop() if self._free else next(self._numbers)
        try:
            with time_budget(plan.options.compile_timeout_s, f"capture {number}"):
                key = stored_key(plan, is_counted=self._keeps_captures)
                is_kept = key is not None and self._keeps_captures
                run = load_capture(key, plan, number, self.runtime) if key is not None and is_kept else None
                return number, run or self._compile(plan, number, key), run is not None
        except (AssertionError, *exceptions_allowed_to_be_fallback):
            # Dynamo breaks the graph here, and continues as if it had not been captured.
            self._free.append(number)
            raise

    def _compile(self, plan: CompilePlan, number: int, stored_as: str | None) -> Callable[..., Any]:
        """A callable for the capture, which can be stored in the disk cache if it has a key there."""
        lowering = self._export or get_lowering(plan.options.lowering)
        compile_later = partial(torch.compile, backend=self.as_backend(plan.options))
        record, start = CaptureRecord() if stored_as is not None else None, time.perf_counter()
        run = CaptureCompiler(plan, number, self.runtime, lowering, self._salt, compile_later, record).compile()
        if stored_as is not None and record is not None and self._keeps_captures:
            store_capture(stored_as, record, time.perf_counter() - start)
        return run


def _input_names(capture: Capture) -> tuple[str, ...]:
    """The inputs of a capture, as the user's code names them."""
    return tuple(python_text(node) for node in capture.gm.graph.find_nodes(op="placeholder"))


def _forget(_: CompileKey, program: Program) -> None:
    program.executable = None


SESSION = Session(observe=log_event, keeps_captures=True)
