"""What the passes did, as a section of a page; and the casts of graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kp_dynamo.explanation.graph_reports import PassOnGraph
from kp_dynamo.explanation.pass_text import alike_refusals, first_places
from kp_dynamo.explanation.text_layout import counted
from kp_dynamo.page.content import Section, Sides, Table

_MAX_GRAPHS = 3


def passes_section(passes: Sequence[PassOnGraph], verbose: bool) -> Section:
    """A row for each pass that did something, with its notes and refusals; `verbose` names every place."""
    names = list(dict.fromkeys(done.name for done in passes))
    active = [name for name in names if any(_did(d) for d in passes if d.name == name)]
    idle = [name for name in names if name not in active]
    runs = [[done for done in passes if done.name == name] for name in active]
    rows = tuple(
        (
            name,
            str(sum(_did(d) for d in found)),
            str(sum(d.rewritten for d in found)),
            str(sum(len(d.refused) for d in found)),
        )
        for name, found in zip(active, runs, strict=True)
    )
    details = tuple((*_notes(found), *_refusals(found, verbose)) for found in runs)
    parts = (Table(("pass", "graphs", "rewrote", "refused"), rows, details=details),) if rows else ()
    examples = [done for found in runs if (done := _with_example(found)) is not None]
    summary = f"{counted(len(active), 'pass', 'passes')} changed or refused something."
    if idle:
        summary += f" {len(idle)} found nothing to do: {', '.join(idle)}."
    return Section("passes", "Passes", (*parts, *map(_example, examples)), summary)


def _with_example(found: Iterable[PassOnGraph]) -> PassOnGraph | None:
    return next((done for done in found if done.example is not None), None)


def _example(done: PassOnGraph) -> Sides:
    """Some operators before and after the pass, with the user's line."""
    found = done.example
    assert found is not None, "it was chosen for its example"
    where = found.place.text(verbose=True)
    more = f"{counted(found.num_more, 'more operator')} of the same edit are left out." if found.num_more else ""
    before, after = ("\n".join(lines) or "no operator" for lines in (found.before, found.after))
    return Sides(f"{done.name}, for example{f' {where}' if where else f' in {done.graph}'}", before, after, more)


def _did(done: PassOnGraph) -> bool:
    """Whether a pass did something with a graph, or says why not."""
    return bool(done.rewritten or done.refused or done.notes)


def casts_section(casts: Iterable[tuple[str, dict[str, int]]]) -> Section:
    """The casts in the lowered graphs; `casts` has them by graph."""
    rows = [(graph, pair, str(count)) for graph, found in casts for pair, count in found.items()]
    total: Counter[str] = Counter()
    for _, pair, count in rows:
        total[pair] += int(count)
    summary = "; ".join(f"{count} x {pair}" for pair, count in total.most_common())
    table = Table(("graph", "cast", "count"), tuple(rows), num_left=2, folded=f"by graph: {len(rows)} rows")
    return Section("casts", "Casts", (table,) if rows else (), f"In the lowered graphs: {summary}.")


def _notes(found: Iterable[PassOnGraph]) -> list[str]:
    graphs: dict[str, list[str]] = {}
    for done in found:
        for note in done.notes:
            graphs.setdefault(note, []).append(done.graph)
    return [f"{_named(names)}: {note}" for note, names in graphs.items()]


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_GRAPHS} more" if len(names) > _MAX_GRAPHS else ""
    return f"{', '.join(names[:_MAX_GRAPHS])}{more}"


def _refusals(found: Sequence[PassOnGraph], verbose: bool) -> list[str]:
    lines = []
    for _, reason, places in alike_refusals(found):
        where = first_places(places, None) if verbose else first_places(places)
        lines.append(f"refused {len(places)}: {reason}{f', {where}' if where else ''}")
    return lines
