"""An explanation as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from kp_dynamo.explanation.disk_report import disk_lines
from kp_dynamo.explanation.figures import ExplanationFigures
from kp_dynamo.explanation.graph_reports import (
    CaptureReport,
    DivisionReport,
    FallbackReport,
    GraphBreak,
    GraphReport,
    PieceReport,
    UncompiledFrame,
    WholeTensor,
)
from kp_dynamo.explanation.ledger_text import ledger_lines
from kp_dynamo.explanation.pass_text import first_places, pass_lines
from kp_dynamo.explanation.text_layout import counted, rows_with_details, wrapped
from kp_dynamo.graph.places import Place, short_line

T = TypeVar("T")


def text_of(found: ExplanationFigures, verbose: bool = False) -> str:
    """The report for people; `verbose` as for `Explanation.text`."""
    return wrapped(
        [
            *_uncompiled_lines(found.uncompiled),
            *_section("graph breaks", found.graph_breaks, _break_lines),
            *_section("graphs captured by Dynamo", found.captures, _capture_lines),
            *division_lines(found.divisions, verbose),
            *pass_lines(found.passes, verbose),
            *ledger_lines(found.passes),
            *_section("graphs lowered", found.graphs, _graph_lines),
            f"XLA programs: {found.num_programs}",
            f"compile cache: {counted(found.num_hits, 'hit')}, {counted(found.num_misses, 'miss', 'misses')}",
            *disk_lines(found.disk),
            *_whole_lines(found.whole),
            *_section("operators on the CPU", found.fallbacks, partial(_fallback_lines, verbose=verbose)),
            f"seconds: {', '.join(f'{stage} {value:.2f}' for stage, value in found.seconds.items())}",
        ]
    )


def _section(title: str, items: Sequence[T], lines: Callable[[Sequence[T]], Iterable[str]]) -> Iterator[str]:
    """The number of items, and their lines if there are any."""
    yield f"{title}: {len(items) or 'none'}"
    if items:
        yield from (f"  {line}" for line in lines(items))


def _uncompiled_lines(frames: Sequence[UncompiledFrame]) -> Iterator[str]:
    """The functions that Dynamo gave up, with their number before them; no line if it gave up no function."""
    if frames:
        yield f"NOT COMPILED, runs eagerly: {len(frames)}"
    for found in frames:
        yield f"  {short_line(found.line)}: {found.reason.strip().splitlines()[0]}"


def _whole_lines(tensors: Sequence[WholeTensor]) -> Iterator[str]:
    """A line for each large tensor that every device holds whole."""
    if tensors:
        yield f"large tensors, whole on every device: {len(tensors)}"
    for found in tensors:
        yield f"  {found.name}: {found.dtype}{list(found.shape)}, {found.size_bytes / 2**20:.0f} MiB"


def _break_lines(breaks: Sequence[GraphBreak]) -> Iterator[str]:
    """The line and the reason of each break, and the text of its line."""
    for found in breaks:
        yield f"{short_line(found.line) or 'at an unknown line'}: {found.reason.splitlines()[0]}"
        if found.source:
            yield f"  {found.source}"


def _capture_lines(captures: Sequence[CaptureReport]) -> Iterator[str]:
    """Number, seconds and key of each capture."""
    for capture in captures:
        name = "equal to an earlier one" if capture.number is None else str(capture.number)
        yield f"{name}: {capture.seconds:.2f} s, {_looked_up(capture.key, capture.is_hit, capture.why_missed)}"
        yield from (f"  {change}" for change in capture.changes)


def division_lines(divisions: Sequence[DivisionReport], verbose: bool = False) -> Iterator[str]:
    """The repeated layers of each divided graph; `verbose` also says why the other graphs stay whole."""
    for found in divisions:
        layers = [_repeated(piece) for piece in found.pieces if piece.runs > 1]
        if layers:
            yield f"repeated layers, compiled once: {', '.join(layers)}"
        elif verbose and found.reason:
            yield f"repeated layers: none compiled once; {found.reason}"


def _repeated(piece: PieceReport) -> str:
    each = f" ({piece.layers} layers each)" if piece.layers > 1 else ""
    return f"{piece.module or 'layer'} x {piece.runs}{each}"


def _graph_lines(graphs: Sequence[GraphReport]) -> Iterator[str]:
    """A row for each graph, with its key and its casts below."""
    stages = list(dict.fromkeys(stage for graph in graphs for stage in graph.seconds))
    rows = [("graph", "operators", "programs", *(f"{stage} s" for stage in stages))]
    for graph in graphs:
        spent = (f"{graph.seconds[stage]:.2f}" if stage in graph.seconds else "-" for stage in stages)
        rows.append((graph.name, str(graph.num_operators), str(graph.num_programs), *spent))
    return rows_with_details(rows, [tuple(_details(graph)) for graph in graphs])


def _details(graph: GraphReport) -> Iterator[str]:
    yield _looked_up(graph.key, graph.is_hit, graph.why_missed)
    if graph.casts:
        yield f"casts: {', '.join(f'{count} x {pair}' for pair, count in graph.casts.items())}"


def _fallback_lines(fallbacks: Sequence[FallbackReport], verbose: bool = False) -> Iterator[str]:
    """A row for each operator, with its place in the model below."""
    rows = [("graph", "operator", "bytes moved"), *((f.graph, f.op, str(f.moved_bytes)) for f in fallbacks)]
    places = [fallback_place(f, verbose) for f in fallbacks]
    return rows_with_details(rows, [(place,) if place else () for place in places], num_left=2)


def fallback_place(fallback: FallbackReport, verbose: bool = False) -> str:
    """The user's line, or the modules that run a library's line; both if `verbose`."""
    places = [Place(fallback.line, module) for module in fallback.modules or ("",)]
    if verbose and fallback.modules:
        return ", ".join((first_places(places, most=None), Place(fallback.line).text()))
    return first_places(places) if places[0].is_in_library else places[0].text()


def _looked_up(key: str, is_hit: bool, why_missed: str) -> str:
    found = "in the cache" if is_hit else f"not in the cache: {why_missed}"
    return f"key {key}, {found}" if key else found
