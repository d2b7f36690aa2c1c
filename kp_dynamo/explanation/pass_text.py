"""What the passes did, as text: one row a pass, or all of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from kp_dynamo.explanation.graph_reports import PassOnGraph
from kp_dynamo.explanation.text_layout import first_of, rows_with_details
from kp_dynamo.graph.places import Place, short_line

_NUM_PLACES = 3
_NUMBER_OF_NODE = re.compile(r"(?<=[a-z])_\d+\b")


def pass_lines(passes: Sequence[PassOnGraph], verbose: bool = False) -> Iterator[str]:
    """Each pass once, with its counts over all graphs; `verbose` has a row for each graph instead."""
    return _every_run(passes) if verbose else _every_pass(passes)


def _every_pass(passes: Sequence[PassOnGraph]) -> Iterator[str]:
    """A pass is left out if it rewrote nothing, refused nothing and has no note."""
    names = dict.fromkeys(done.name for done in passes)  # in the order of their first runs
    by_name = {name: runs for name in names if (runs := _effective_runs(name, passes))}
    num_idle = len(names) - len(by_name)
    yield f"passes: {len(by_name) or 'none'}{f', and {num_idle} that found nothing to do' if num_idle else ''}"
    rows = [("pass", "graphs", "rewrote", "refused"), *(_sums(name, runs) for name, runs in by_name.items())]
    details = [(*_note_lines(runs), *_refusal_lines(runs)) for runs in by_name.values()]
    yield from (f"  {line}" for line in rows_with_details(rows, details))


def _every_run(passes: Sequence[PassOnGraph]) -> Iterator[str]:
    yield f"passes: {len(passes) or 'none'}"
    rows = [("graph", "pass", "rewrote", "refused")]
    rows += [(done.graph, done.name, str(done.rewritten), str(len(done.refused))) for done in passes]
    details = [(*done.notes, *_all_refusals(done)) for done in passes]
    yield from (f"  {line}" for line in rows_with_details(rows, details, num_left=2))


def _effective_runs(name: str, passes: Sequence[PassOnGraph]) -> list[PassOnGraph]:
    return [done for done in passes if done.name == name and (done.rewritten or done.refused or done.notes)]


def _sums(name: str, found: Sequence[PassOnGraph]) -> tuple[str, ...]:
    return name, str(len(found)), str(sum(r.rewritten for r in found)), str(sum(len(r.refused) for r in found))


def _note_lines(found: Sequence[PassOnGraph]) -> Iterator[str]:
    """Each note once, with the graphs it is about."""
    graphs: dict[str, list[str]] = {}
    for done in found:
        for note in done.notes:
            graphs.setdefault(note, []).append(done.graph)
    yield from (f"{', '.join(first_of(names, _NUM_PLACES))}: {note}" for note, names in graphs.items())


def _refusal_lines(found: Sequence[PassOnGraph]) -> Iterator[str]:
    for _, reason, places in alike_refusals(found):
        yield f"refused {len(places)}: {reason}"
        if where := first_places(places):
            yield f"  {where}"


def alike_refusals(passes: Sequence[PassOnGraph]) -> Iterator[tuple[str, str, list[Place]]]:
    """Pass, reason and places of each reason once.

    Reasons of a pass that differ only in the numbers of nodes ("view_2", "view_7") count as the same.
    """
    alike: dict[tuple[str, str], list[tuple[str, Place]]] = {}
    for done in passes:
        for (_, reason), place in zip(done.refused, _places(done), strict=True):
            alike.setdefault((done.name, _NUMBER_OF_NODE.sub("", reason)), []).append((reason, place))
    for (name, _), refused in alike.items():
        yield name, refused[0][0], [place for _, place in refused]


def first_places(places: Sequence[Place], most: int | None = _NUM_PLACES) -> str:
    """ "in layers.0.attn (Attention), layers.1.attn (Attention), and 2 more": modules, or lines outside of modules."""
    names = list(dict.fromkeys(name for place in places if (name := place.module or short_line(place.line))))
    is_in_module = any(place.module for place in places)
    return f"{'in' if is_in_module else 'at'} {', '.join(first_of(names, most))}" if names else ""


def _all_refusals(done: PassOnGraph) -> Iterator[str]:
    for (node, reason), place in zip(done.refused, _places(done), strict=True):
        yield f"refused {node}: {reason}"
        if where := place.text(verbose=True):
            yield f"  {where}"


def _places(done: PassOnGraph) -> tuple[Place, ...]:
    """A place for each refusal; unknown if the report is from an earlier version."""
    return done.places or (Place(""),) * len(done.refused)
