"""`aot_compile`: the pipeline of `torch.compile(model, backend="kp_tpu")`, ending in the TPU compiler."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kp_dynamo.aot.compiler import TpuCompiler
from kp_dynamo.aot.live_values import LiveValues, live_values
from kp_dynamo.aot.memory_line import ProgramCall, memory_line
from kp_dynamo.aot.program_report import ProgramReport
from kp_dynamo.aot.programs import Target, program_report
from kp_dynamo.aot.report import AotReport
from kp_dynamo.aot.request import AotRequest, Machine, request_of
from kp_dynamo.aot.slice_report import SliceReport
from kp_dynamo.aot.worker_process import libtpu_flags
from kp_dynamo.compat import xla
from kp_dynamo.compat.versions import check_versions
from kp_dynamo.config.matmul_precision import resolve_matmul_precision
from kp_dynamo.exceptions import XLACompilationError
from kp_dynamo.explanation.graph_reports import PieceReport
from kp_dynamo.explanation.run_once import dynamo_seconds, fresh_dynamo, graph_breaks, uncompiled
from kp_dynamo.explanation.subject import Subject
from kp_dynamo.hardware import CHIPS, DEVICES
from kp_dynamo.lowering.fake_run import ProgramRun


def aot_compile(
    model: Callable[..., Any],
    args: Sequence[Any],
    *,
    target: str = "v5e",
    chips: int | str | None = None,
    mesh: Any = None,
    sharding: Any = None,
    options: Any = None,
    train: bool = False,
    backend: str = "kp_tpu",
    timeout_s: float | None = None,
) -> AotReport:
    """Compile `model(*args)` with the TPU compiler, without a TPU, and report the compiled programs.

    The model does not run. It is copied onto fake tensors and goes through the pipeline of
    `torch.compile(model, backend="kp_tpu", options=options)`; libtpu then compiles each program. With
    `backend="openxla"` or `options={"lowering": "stock"}` the model is called with real tensors on XLA:CPU, because
    torch_xla's own bridge cannot trace otherwise; its programs do not run there and return zeros. Dynamo is reset
    before and after.

    Args:
        model: A module or function; its tensors may be on the CPU, on the XLA device or on the meta device.
        args: Its arguments, on any of these devices.
        target: "v4", "v5e", "v5p", "v6e" or "v7".
        chips: The number of chips, or their topology, such as "4x4". Several hosts are allowed. None: one device, which
            is a chip, and on v7 half a chip.
        mesh: Names and sizes of the axes, such as {"data": 4, "model": 4}, whose product is the number of devices: of
            chips, and on v7 twice as many. None: all along "data".
        sharding: How the parameters lie on the mesh: "data", "fsdp", "tensor", "fsdp+tensor", or a dict.
        options: As for `torch.compile`.
        train: True: training mode, with the backward programs. False: eval mode, without gradients.
        backend: "kp_tpu", or "openxla" for comparison.
        timeout_s: Time limit of the TPU compiler in seconds, after which it is killed. None: `compile_timeout_s` of
            the options if set, else no limit.

    Raises:
        TPUConfigurationError: An unknown target, option or backend; chips that are not sold; a mesh that is not all
            devices; a sharding that does not fit the model.
        TPUNotAvailableError: The TPU compiler is not installed.
        TPUModelPreparationError: The model cannot be copied, or its parameters have no shapes yet.
        TPUOutOfMemoryError: The model cannot fit the chip, or the compiler did not make it fit.
        XLACompilationError: Any other failure, such as a shape that depends on values.
        XLACompilationTimeoutError: The time limit passed.
    """
    start = time.perf_counter()
    request = request_of(model, args, Machine(target, chips, mesh, sharding), options, backend, train)
    timeout_s = request.given.get("compile_timeout_s") if timeout_s is None else timeout_s
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    shape = "" if request.slice is None else str(request.slice.topology)
    with TpuCompiler(target, deadline, request.options.checkpoint, shape) as compiler:
        xla.device()
        run = _Run(request, compiler)
        with fresh_dynamo(), torch.inference_mode(False), torch.set_grad_enabled(train):
            run.trace()
        programs = run.collected()
        versions = {**check_versions(), **compiler.versions}
    if not programs:
        raise XLACompilationError(
            "the model has no operation to compile. Allowed: a model that computes with tensors. A graph break before "
            "its first operator leaves nothing to compile."
        )
    seconds = {**run.seconds, "tpu": sum(p.compile_s for p in programs), "total": time.perf_counter() - start}
    return run.report(programs, seconds, versions)


@dataclass
class _Run:
    """One run of a request: the submitted programs and the recorded events.

    Attributes:
        handed_over: The programs, in the order of their names.
        submitted: The programs that are compiled, each with the one whose name it has: for several chips, the same
            program with its shardings.
    """

    request: AotRequest
    compiler: TpuCompiler
    handed_over: list[Any] = field(default_factory=list)
    submitted: list[tuple[Any, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    graph_breaks: tuple[str, ...] = ()
    runs: list[ProgramRun] = field(default_factory=list)

    def __post_init__(self) -> None:
        from kp_dynamo.explanation.recorder import Recorder

        self.recorder = Recorder((), ())
        self.placer: Any = None
        if self.request.slice is not None:
            from kp_dynamo.aot.placing import StepPlacer
            from kp_dynamo.aot.tensor_plan import needed_plan

            found = self.request.slice
            plan = needed_plan(self.request.model, self.request.args, found.mesh, found.sharding)
            word = CHIPS[self.request.target].device_word
            self.placer = StepPlacer(found.mesh, self._submit, plan, device_word=word)

    def trace(self) -> None:
        """Trace the model and submit each program to the TPU compiler, which works in parallel."""
        from kp_dynamo.aot.trace_programs import call_on_fakes, call_on_zeros

        before = dynamo_seconds()
        if self.request.needs_device:
            self.runs = call_on_zeros(self.request, self._receive, self._observe)
        else:
            self.runs = call_on_fakes(self.request, self._receive, self._observe, self.placer)
        breaks = graph_breaks()
        self.graph_breaks = tuple(f"{b.line or 'at an unknown line'}: {b.reason.splitlines()[0]}" for b in breaks)
        self.seconds = {"dynamo": dynamo_seconds() - before, **self.recorder.seconds()}
        del self.seconds["xla"]  # nothing is compiled for XLA:CPU

    def _receive(self, program: Any) -> None:
        self.handed_over.append(program)
        if self.placer is None:
            self._submit(program, program)

    def _submit(self, program: Any, placed: Any) -> None:
        self.submitted.append((program, placed))
        kernels = ("", 1) if self.placer is None else self.placer.kernels
        lies = placed.input_shardings, placed.result_shardings
        self.compiler.submit(placed.stablehlo, placed.donated, *lies, kernels)

    def _observe(self, event: Any) -> None:
        from kp_dynamo.runtime.events import ProgramReady

        self.recorder(event)
        if isinstance(event, ProgramReady):
            new = self.handed_over[len(self.names) :]
            self.names += [event.label if len(new) == 1 else f"{event.label}.{i}" for i in range(len(new))]

    def collected(self) -> tuple[ProgramReport, ...]:
        """Reports of the submitted programs."""
        compiled = ((name, p, self.compiler.result()) for name, p in self._named())
        pieces = self._pieces()
        target = Target(DEVICES[self.request.target], self.request.slice)
        return tuple(program_report(n, p, made, target, pieces.get(n.split(".")[0])) for n, p, made in compiled)

    def _named(self) -> list[tuple[str, Any]]:
        """The submitted programs and their names. A program with other shardings has a number behind its name."""
        self.names += [f"{i}.{p.name}" for i, p in enumerate(self.handed_over, 1)][len(self.names) :]
        names = {id(program): name for name, program in zip(self.names, self.handed_over, strict=True)}
        seen: Counter[str] = Counter()
        found = []
        for program, placed in self.submitted:
            seen[name := names[id(program)]] += 1
            found.append((name if seen[name] == 1 else f"{name}-{seen[name]}", placed))
        return found

    def _pieces(self) -> dict[str, PieceReport]:
        """The pieces of divided graphs, by the numbers of their captures."""
        return {str(piece.capture): piece for found in self.recorder.divisions for piece in found.pieces}

    def _live_at_peak(self, programs: tuple[ProgramReport, ...]) -> tuple[LiveValues, ...]:
        """What lives while the program runs whose peak is that of the step."""
        peaks = [point.peak_bytes for point in memory_line(programs, self._calls())]
        if not peaks:
            return ()
        names = {id(program): name for name, program in zip(self.names, self.handed_over, strict=True)}
        pieces = self._pieces()
        live = self.runs[peaks.index(max(peaks))].live
        return live_values(live, lambda program: pieces.get(names.get(id(program), "").split(".")[0]))

    def _calls(self) -> tuple[ProgramCall, ...]:
        """The runs of the programs in a step, by their names."""
        names = {id(program): name for name, program in self._named()}
        return tuple(ProgramCall(names[id(run.program)], run.held_bytes) for run in self.runs)

    def report(
        self, programs: tuple[ProgramReport, ...], seconds: dict[str, float], versions: dict[str, str]
    ) -> AotReport:
        request, options = self.request, self.request.options
        precision = resolve_matmul_precision(options.matmul_precision, torch.get_float32_matmul_precision())
        return AotReport(
            target=request.target,
            backend=request.backend,
            options={name: _plain(value) for name, value in request.given.items()},
            train=request.train,
            matmul_precision="default" if request.needs_device else precision,
            programs=programs,
            memory_budget_bytes=request.memory_budget_bytes,
            seconds=seconds,
            peak_host_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            passes=tuple(
                "; ".join([f"{p.graph} {p.name}: rewrote {p.rewritten}, refused {len(p.refused)}", *p.notes])
                for p in self.recorder.passes
            ),
            graph_breaks=self.graph_breaks,
            fallbacks=tuple(f"{f.graph} {f.op} at {f.line}" for f in self.recorder.fallbacks()),
            num_tokens=_num_tokens(request.args),
            versions=versions,
            pass_reports=tuple(self.recorder.passes),
            fallback_reports=tuple(self.recorder.fallbacks()),
            calls=self._calls(),
            slice=self._slice(),
            live_at_peak=self._live_at_peak(programs),
            subject=Subject.of_call(uncompiled(request.model), request.args, {}),
            libtpu_flags=libtpu_flags(),
        )

    def _slice(self) -> SliceReport | None:
        found = self.request.slice
        if found is None:
            return None
        topology = found.topology
        sizes = str(topology), topology.num_chips, topology.num_hosts
        return SliceReport(*sizes, str(found.mesh), str(found.sharding), tuple(self.placer.whole))


def _plain(value: Any) -> Any:
    """A JSON-serializable form of `value`."""
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None), dict)) else repr(value)


def _num_tokens(args: tuple[Any, ...]) -> int:
    first = args[0] if args else None
    is_integer = isinstance(first, torch.Tensor) and not first.dtype.is_floating_point and first.dtype != torch.bool
    return first.numel() if isinstance(first, torch.Tensor) and is_integer else 0
