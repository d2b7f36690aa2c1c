"""What is wrong, for a page: each with the line of the user's code and what to do."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from kp_dynamo.explanation.graph_reports import (
    CaptureReport,
    FallbackReport,
    GraphBreak,
    PassOnGraph,
    UncompiledFrame,
    WholeTensor,
)
from kp_dynamo.explanation.pass_text import alike_refusals, first_places
from kp_dynamo.explanation.report_text import fallback_place
from kp_dynamo.explanation.text_layout import counted
from kp_dynamo.graph.places import short_line
from kp_dynamo.page.content import Problem
from kp_dynamo.page.units import size_text

_HINT = "Hint:"
_MAX_HINTS = 3
_MAX_REFUSALS = 6
_BREAK_CURE = "rewrite the line without what Dynamo cannot trace, or move it out of the compiled function."
_BRANCH = "generic_jump"  # Dynamo's word for `if` and `while`
_BRANCH_CURE = "compute both sides and choose with torch.where, or move the branch out of the compiled function."
_FALLBACK_CURE = (
    "use an operator that XLA can lower, or call this one outside of the compiled function: each is two copies and one "
    "more program in every step."
)
_WHOLE_CURE = "divide it: docs/sharding.md has the rules for parameters, and where other tensors lie."


def uncompiled_problems(frames: Iterable[UncompiledFrame]) -> Iterator[Problem]:
    """Functions that run eagerly, of which nothing is compiled."""
    for found in frames:
        what, cure = (
            f"This function is not compiled and runs eagerly: {_first_line(found.reason)}",
            _hints(found.reason),
        )
        yield Problem("stop", what, short_line(found.line), cure=cure or _BREAK_CURE, details=found.reason.strip())


def break_problems(breaks: Iterable[GraphBreak]) -> Iterator[Problem]:
    """Places at which Dynamo cuts a function in two."""
    for found in breaks:
        where, first = short_line(found.line) or "an unknown line", _first_line(found.reason)
        if first.startswith(_BRANCH):
            what, cure = "Graph break: a branch depends on the values of a tensor.", _BRANCH_CURE
        else:
            what, cure = f"Graph break: {first}", _hints(found.reason) or _BREAK_CURE
        yield Problem("slow", what, where, found.source, cure, found.reason.strip())


def fallback_problems(fallbacks: Iterable[FallbackReport], *, has_run: bool) -> Iterator[Problem]:
    """Operators that run on the CPU between two programs; their bytes are known if the model `has_run`."""
    num_bytes: Counter[tuple[str, str]] = Counter()
    for found in fallbacks:  # a forward and its backward may have the same
        num_bytes[found.op, fallback_place(found).removeprefix("at ").removeprefix("in ")] += found.moved_bytes
    for (op, place), size in num_bytes.items():
        moved = f" and moves {size_text(size)} in a step" if has_run else ""
        yield Problem("slow", f"{op} runs on the CPU{moved}.", place, cure=_FALLBACK_CURE)


def recompilation_problems(captures: Iterable[CaptureReport]) -> Iterator[Problem]:
    """Code that was compiled before, and is compiled again for other inputs; graphs with equal changes together."""
    seconds: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    for found in captures:
        if found.changes:
            seconds[found.changes].append(found.seconds)
    for changes, spent in seconds.items():
        what = f"Compiled again: {counted(len(spent), 'graph')}, {sum(spent):.1f} s: {'; '.join(changes)}"
        sizes = all(" is [" in change for change in changes)
        cure = "pad to one size, or use buckets (docs/buckets.md)." if sizes else "call it with equal inputs."
        yield Problem("slow", what, cure=cure)


def refusal_problems(passes: Sequence[PassOnGraph]) -> Iterator[Problem]:
    """Matches that passes left alone, each reason once; the section of the passes has all."""
    found = [(name, reason, places) for name, reason, places in alike_refusals(passes)]
    for name, reason, places in found[:_MAX_REFUSALS]:
        where = first_places(places).removeprefix("at ").removeprefix("in ")
        cure = f"docs/passes.md#{name} says what the pass rewrites, and what it refuses. The result is right as it is."
        yield Problem("note", f"{name} left {len(places)} of its matches alone: {reason}", where, cure=cure)
    if len(found) > _MAX_REFUSALS:
        more = f"{len(found) - _MAX_REFUSALS} more reasons of passes to leave matches alone are in the section Passes."
        yield Problem("note", more)


def whole_problems(tensors: Iterable[WholeTensor]) -> Iterator[Problem]:
    """Large tensors that every device holds, although the model is divided among several."""
    for found in tensors:
        what = (
            f"Every device holds all of {found.name}, {found.dtype}{list(found.shape)}: {size_text(found.size_bytes)}."
        )
        yield Problem("note", what, cure=_WHOLE_CURE)


def _first_line(reason: str) -> str:
    return (reason.strip().splitlines() or ["unknown"])[0].strip()


def _hints(reason: str) -> str:
    """What Dynamo itself recommends."""
    hints = [line.strip().removeprefix(_HINT).strip() for line in reason.splitlines() if line.strip().startswith(_HINT)]
    return " ".join(dict.fromkeys(hints[:_MAX_HINTS]))
