"""An explanation as a page."""

from __future__ import annotations

from collections.abc import Iterator

from kp_dynamo.explanation.disk_report import disk_lines
from kp_dynamo.explanation.figures import ExplanationFigures
from kp_dynamo.explanation.graph_reports import GraphReport
from kp_dynamo.explanation.page_passes import casts_section, passes_section
from kp_dynamo.explanation.page_problems import (
    break_problems,
    fallback_problems,
    recompilation_problems,
    refusal_problems,
    uncompiled_problems,
    whole_problems,
)
from kp_dynamo.explanation.page_stages import stages_section
from kp_dynamo.explanation.report_text import text_of
from kp_dynamo.explanation.text_layout import counted
from kp_dynamo.page.content import Cell, Figure, Lines, Page, Problem, Section, Share, Table, Verbatim
from kp_dynamo.page.units import time_text

_TRUST = (
    "explain ran the model once on this machine's device and recorded what the backend did: graphs, passes, programs "
    "and seconds are what happened.",
    "Hits and misses are what torch.compile would find in this process's caches now.",
    "Seconds of compiling depend on this machine and its load. The first program of a process also starts XLA.",
    "Time, memory, the roofline and time by module are not here: explain asks no TPU's compiler. "
    "python -m kp_dynamo aot SPEC --html FILE estimates them without a TPU.",
)


def page_of(found: ExplanationFigures, verbose: bool = False, date: str = "") -> Page:
    """The page of an explanation."""
    return Page(
        title="kp_tpu: how a model is compiled",
        headline=_headline(found),
        figures=_figures(found),
        problems=tuple(_problems(found)),
        sections=(
            stages_section(found.seconds),
            _programs(found),
            _layers(found),
            passes_section(found.passes, verbose),
            casts_section((graph.name, graph.casts) for graph in found.graphs),
            _cache(found),
            Section("versions", "Versions", versions_parts(found.versions)),
            Section("trust", "How far to trust it", (Lines(_TRUST, listed=True),)),
            Section("text", "The same as text", (Verbatim("as the terminal shows it", text_of(found, verbose)),)),
        ),
        about=found.subject.facts(date),
    )


def versions_parts(versions: dict[str, str]) -> tuple[Table, ...]:
    """A row for each version; () if none is known."""
    return (Table(("package", "version"), tuple(versions.items()), num_left=2),) if versions else ()


def layers_sentence(blocks: list[tuple[int, int]], *, train: bool) -> str:
    """ "All 8 layers share one program.": for (layers in a run, runs) of each repeated block."""
    if len(blocks) == 1:
        ((layers, runs),) = blocks
        each = f", {layers} layers a run" if layers > 1 else ""
        return f"All {layers * runs} layers share one {'forward and one backward ' if train else ''}program{each}."
    kinds = f"{len(blocks)} {'forwards and backwards' if train else 'programs'}"
    return f"{sum(layers * runs for layers, runs in blocks)} layers share {kinds}." if blocks else ""


def _repeated(found: ExplanationFigures) -> list[tuple[int, int]]:
    return [(p.layers, p.runs) for division in found.divisions for p in division.pieces if p.runs > 1]


def _headline(found: ExplanationFigures) -> str:
    seconds = time_text(sum(found.seconds.values()) * 1e3)
    done = f"{_graphs(found)} became {counted(found.num_programs, 'program')} in {seconds} of compiling."
    problems = [
        (len(found.uncompiled), "function is not compiled", "functions are not compiled"),
        (len(found.graph_breaks), "graph break", "graph breaks"),
        (len(found.fallbacks), "operator on the CPU", "operators on the CPU"),
        (sum(bool(c.changes) for c in found.captures), "recompilation for other inputs", "recompilations"),
    ]
    told = [counted(number, noun, plural) for number, noun, plural in problems if number]
    wrong = f"{', '.join(told)}." if told else "No graph breaks, and nothing runs on the CPU."
    layers = layers_sentence(_repeated(found), train=_num_backwards(found) > 0)
    return " ".join(part for part in (done, wrong, layers) if part)


def _graphs(found: ExplanationFigures) -> str:
    """ "2 graphs and 2 backwards"."""
    backwards = _num_backwards(found)
    graphs = counted(len(found.graphs) - backwards, "graph")
    return f"{graphs} and {counted(backwards, 'backward')}" if backwards else graphs


def _num_backwards(found: ExplanationFigures) -> int:
    return sum(graph.name.endswith(".backward") for graph in found.graphs)


def _figures(found: ExplanationFigures) -> tuple[Figure, ...]:
    looked_up = f"{counted(found.num_hits, 'hit')}, {counted(found.num_misses, 'miss', 'misses')}"
    return (
        Figure("Compiling", time_text(sum(found.seconds.values()) * 1e3)),
        Figure("Programs", str(found.num_programs), f"of {_graphs(found)}"),
        Figure("Graph breaks", str(len(found.graph_breaks))),
        Figure("Operators on the CPU", str(len(found.fallbacks))),
        Figure("Found in the cache", f"{found.num_hits} of {len(found.graphs)}", looked_up),
    )


def _problems(found: ExplanationFigures) -> Iterator[Problem]:
    yield from uncompiled_problems(found.uncompiled)
    yield from break_problems(found.graph_breaks)
    yield from fallback_problems(found.fallbacks, has_run=True)
    yield from recompilation_problems(found.captures)
    yield from whole_problems(found.whole)
    yield from refusal_problems(found.passes)


def _programs(found: ExplanationFigures) -> Section:
    whole = sum(sum(graph.seconds.values()) for graph in found.graphs)
    rows = tuple(_program_row(graph, whole) for graph in found.graphs)
    head = ("graph", "operators", "programs", "compiling", "share")
    summary = f"In the order of compiling: {counted(found.num_programs, 'XLA program')}."
    return Section("programs", "Programs", (Table(head, rows),) if rows else (), summary)


def _program_row(graph: GraphReport, whole: float) -> tuple[Cell, ...]:
    seconds = sum(graph.seconds.values())
    share = Share(seconds / whole if whole else 0)
    time = time_text(seconds * 1e3) if graph.seconds else "shared"
    return graph.name, str(graph.num_operators), str(graph.num_programs), time, share


def _layers(found: ExplanationFigures) -> Section:
    rows = tuple(
        (piece.module or "outside of modules", str(piece.num_operators), str(piece.runs), _capture(piece.capture))
        for division in found.divisions
        for piece in division.pieces
    )
    whole = tuple(d.reason for d in found.divisions if d.reason)
    parts = (Table(("piece", "operators", "runs", "capture"), rows),) if rows else ()
    lines = (Lines(tuple(f"Not divided: {reason}" for reason in dict.fromkeys(whole))),) if whole else ()
    return Section("layers", "Repeated layers", (*parts, *lines))


def _capture(number: int | None) -> str:
    return "from the cache" if number is None else str(number)


def _cache(found: ExplanationFigures) -> Section:
    captures = tuple(
        ("equal to an earlier one" if c.number is None else f"capture {c.number}", *_looked_up(c.is_hit), c.key)
        for c in found.captures
    )
    why = tuple((*c.changes, *(() if c.is_hit else (f"nearest: {c.why_missed}",))) for c in found.captures)
    graphs = tuple((f"graph {g.name}", *_looked_up(g.is_hit), g.key) for g in found.graphs)
    reasons = tuple(() if g.is_hit else (f"nearest: {g.why_missed}",) for g in found.graphs)
    head = ("looked up", "found", "key")
    parts = (
        Table(head, captures, num_left=3, details=why),
        Table(head, graphs, num_left=3, details=reasons, folded=f"graphs: {counted(len(graphs), 'look-up')}"),
    )
    summary = f"Graphs: {counted(found.num_hits, 'hit')}, {counted(found.num_misses, 'miss', 'misses')}."
    disk = tuple(line.strip() for line in disk_lines(found.disk))
    lines = (Lines(disk),) if disk else ()
    return Section("cache", "Cache", (*(part for part in parts if part.rows), *lines), summary)


def _looked_up(is_hit: bool) -> tuple[str]:
    return ("hit" if is_hit else "miss",)
