"""`plan`: which chips, mesh, sharding, batch and checkpoint mode train a model best."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kp_dynamo.aot.step_graphs import StepGraphs
from kp_dynamo.aot.worker_process import python_for
from kp_dynamo.exceptions import (
    TPUBackendError,
    TPUConfigurationError,
    TPUNotAvailableError,
    TPUOutOfMemoryError,
    XLACompilationError,
)
from kp_dynamo.explanation.subject import Subject
from kp_dynamo.planner.candidates import sold
from kp_dynamo.planner.capture import capture_step
from kp_dynamo.planner.compile_best import BestCompiler, described
from kp_dynamo.planner.fact_source import FactSource
from kp_dynamo.planner.failures import nothing_found
from kp_dynamo.planner.request import Goal, Objective, PlanRequest, plan_request
from kp_dynamo.planner.result import Plan
from kp_dynamo.planner.rows import Figures, RowMaker, in_order
from kp_dynamo.planner.search import Found, search
from kp_dynamo.planner.stored import StoredOutcomes, default_folder, fingerprint

NUM_ROWS = 10


def plan(
    model: Any,
    args: Sequence[Any],
    *,
    train: bool = False,
    targets: Sequence[str] = ("v5e", "v6e", "v5p"),
    max_chips: int = 256,
    tokens_per_step: float | None = None,
    objective: Objective = "cost",
    deadline_hours: float | None = None,
    tokens: float | None = None,
    options: Any = None,
    num_compiled: int = 3,
    folder: str | Path | None = None,
    progress: bool = False,
) -> Plan:
    """Find chips, mesh, sharding, batch and checkpoint mode for `model(*args)`, without a TPU.

    Every combination gets lower bounds of its memory and its time. Those that cannot fit are dropped, and the best of
    the others are compiled by the TPU compiler. Dynamo is reset before and after.

    Args:
        model: A module; its parameters may be on the meta device.
        args: Its arguments. The batch is the first dimension of the first tensor, and is changed.
        train: True: training mode, with the backward and an optimizer. False: inference.
        targets: Generations: "v4", "v5e", "v5p", "v6e" or "v7".
        max_chips: The most chips of a slice.
        tokens_per_step: Tokens of an optimizer step, met within a tenth. None: the batch of `args` is that of a step.
        objective: "cost": the lowest price of a token. "time": the shortest time.
        deadline_hours: The most hours for all `tokens`.
        tokens: Tokens of the whole training.
        options: As for `torch.compile`, but not `target`, `lowering` or `buckets`; `checkpoint` is the only mode then.
        num_compiled: How many candidates to compile; 0: bounds only, which need no TPU compiler.
        folder: Where results of the compiler are kept. None: `kp_tpu/plan` in the user's cache folder.
        progress: Show a progress bar on stderr.

    Raises:
        TPUConfigurationError: An unknown target or option, a target that does not come in so few chips, a deadline that
            nothing can meet.
        TPUNotAvailableError: The TPU compiler is not installed.
        TPUOutOfMemoryError: By its bounds, or as it was compiled, the model fits nowhere.
        XLACompilationError: The model cannot be traced, or the compiler refuses all ways that were tried.
    """
    goal = Goal(targets, max_chips, tokens_per_step, objective, deadline_hours, tokens)
    request = plan_request(model, args, train, goal, options)
    _check_number(num_compiled)
    if num_compiled:
        _check_compilers(goal.targets)
    seconds: dict[str, float] = {}
    with _timed(seconds, "capture"):
        captures, fingerprints = _captures(request)
    with _timed(seconds, "bounds"):
        source = FactSource(request, captures)
        found = search(request, source, [t for target in goal.targets for t in sold(target, max_chips)])
        if not found.fitting:
            raise nothing_found(request, source, found)
    stored = StoredOutcomes(Path(folder) if folder is not None else default_folder(), request, fingerprints)
    compiler = BestCompiler(request, found, stored, progress)
    with _timed(seconds, "compile"):
        compiler.compile(num_compiled)
    return _plan(request, source, found, compiler.tried_and_left(), seconds)


def _check_number(num_compiled: Any) -> None:
    """Before the search, which takes longer than this."""
    if isinstance(num_compiled, bool) or not isinstance(num_compiled, int) or num_compiled < 0:
        raise TPUConfigurationError(f"num_compiled={num_compiled!r} is invalid. Allowed: a whole number, 0 or more.")


def _check_compilers(targets: Sequence[str]) -> None:
    """Raise TPUNotAvailableError if a target has no compiler, before the search."""
    for target in targets:
        python_for(target)
    missing = [name for name in ("libtpu", "jax") if find_spec(name) is None]
    if missing and set(targets) != {"v7"}:
        raise TPUNotAvailableError(
            f"the TPU compiler is not installed ({' and '.join(missing)} missing). Install it with "
            'pip install "kp_dynamo[tpu]". Try: num_compiled=0 (--compile 0) for bounds without it.'
        )


def _captures(request: PlanRequest) -> tuple[dict[Any, StepGraphs], dict[Any, str]]:
    """The graphs of each checkpoint mode that differs from the ones before it, and their fingerprints."""
    captures: dict[Any, StepGraphs] = {}
    prints: dict[Any, str] = {}
    for mode in request.checkpoints:
        # What "auto" keeps depends on the memory of a chip, and is at least what is left of the most recomputation.
        options = {**request.options, "checkpoint": 0 if mode == "auto" else mode}
        capture = capture_step(request.model, request.args, options, request.train)
        found = fingerprint(capture)
        if found not in prints.values():
            captures[mode], prints[mode] = capture, found
    return captures, prints


def _plan(
    request: PlanRequest, source: FactSource, found: Found, figures: Iterable[Figures], seconds: dict[str, float]
) -> Plan:
    goal = request.goal
    ordered = in_order(figures, goal.objective)
    if ordered[0].kind == "late":
        raise TPUConfigurationError(
            f"deadline_hours={goal.deadline_hours:g} is met by bounds only; {described(ordered[0].candidate)} "
            f"{ordered[0].problem}. Try: a later deadline, more chips, or other targets."
        )
    if ordered[0].kind == "failed":
        raise _nothing_compiled(ordered)
    rows = RowMaker(request, source.useful_flops, ordered[0])
    one_host = next((f for f in ordered if f.candidate.layout.is_runnable and not f.problem), None)
    return Plan(
        rows=tuple(map(rows.row, _shown(ordered))),
        one_host=None if one_host is None else rows.row(one_host),
        train=request.train,
        objective=goal.objective,
        targets=tuple(goal.targets),
        max_chips=goal.max_chips,
        num_searched=found.num_searched,
        num_without_memory=found.num_without_memory,
        num_too_late=found.num_too_late,
        deadline_hours=goal.deadline_hours,
        tokens=goal.tokens,
        left_out=source.left_out,
        options={name: _plain(value) for name, value in request.options.items()},
        num_args=len(request.args),
        seconds=seconds,
        subject=Subject.of_call(request.model, request.args, {}),
    )


def _nothing_compiled(failed: list[Figures]) -> TPUBackendError:
    """Why no candidate is left: a problem that is not the memory, if there is one, comes first."""
    other = next((f for f in failed if not f.is_too_large), None)
    if other is not None:
        return XLACompilationError(
            f"no way was compiled; {described(other.candidate)} {other.problem}. Try: num_compiled=0 (--compile 0) for "
            "bounds only, or aot_compile with the same model, which shows the whole error."
        )
    return TPUOutOfMemoryError(
        f"by its bounds, the model fits, but not as it was compiled; the best {described(failed[0].candidate)} "
        f"{failed[0].problem}. Try: more chips, or options={{'checkpoint': 0}}, which recomputes all it can."
    )


def _shown(ordered: list[Figures]) -> list[Figures]:
    """The first ones, and those with a problem once compiled: they took the most time to find out."""
    without, others = [f for f in ordered if not f.problem], [f for f in ordered if f.problem]
    shown = without[: max(1, NUM_ROWS - len(others))]
    return [*shown, *others[: NUM_ROWS - len(shown)]]


def _plain(value: Any) -> Any:
    """A JSON-serializable form of an option."""
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    return value if isinstance(value, (str, int, float, bool, type(None), dict)) else repr(value)


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - start
