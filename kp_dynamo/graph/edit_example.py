"""One small example of what an edit did to a graph: some operators before and after, with the user's line.

The graph is not copied. What a node is called with is a tuple that an edit replaces and never changes, so references to
the tuples of all nodes are enough to know the graph before the edit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from kp_dynamo.graph.node_line import kind_text, node_line
from kp_dynamo.graph.nodes import is_tangent
from kp_dynamo.graph.places import Place, place_of

MAX_LINES = 12
_TAGS = {
    CheckpointPolicy.MUST_RECOMPUTE: "recomputed in the backward",
    CheckpointPolicy.PREFER_RECOMPUTE: "recomputed in the backward",
    CheckpointPolicy.MUST_SAVE: "saved for the backward",
    CheckpointPolicy.PREFER_SAVE: "saved for the backward",
}


@dataclass(frozen=True)
class EditExample:
    """Operators before and after an edit, at most `MAX_LINES` of each.

    Attributes:
        place: Where in the user's model they come from.
        before: A line for each operator that the edit removed or changed.
        after: A line for each operator that the edit inserted or changed.
        num_more: How many operators of the same edit are left out.
    """

    place: Place
    before: tuple[str, ...]
    after: tuple[str, ...]
    num_more: int = 0

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> EditExample:
        """The inverse of `dataclasses.asdict`.

        Raises:
            KeyError, TypeError: The content is not an EditExample.
        """
        lines = {name: tuple(content[name]) for name in ("before", "after")}
        return cls(**{**content, **lines, "place": Place(**content["place"])})


class _Call(NamedTuple):
    """What a node was called with."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Any
    tag: Any

    def is_same(self, other: _Call | None) -> bool:
        """Whether nothing that a line shows differs."""
        return other is not None and (
            self.target is other.target and self.tag == other.tag
            and (self.value is other.value or kind_text(self.value) == kind_text(other.value))
            and self.args == other.args and self.kwargs == other.kwargs
        )  # fmt: skip

    def operands(self) -> list[fx.Node]:
        """The nodes that it reads."""
        found: list[fx.Node] = []
        fx.node.map_arg((self.args, self.kwargs), found.append)
        return found


Snapshot = dict[fx.Node, _Call]


class EditExamples:
    """The examples of the edits of a graph, one after the other."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph, self._before = graph, _snapshot(graph)

    def of_edit(self) -> EditExample | None:
        """An example of what has changed since the last call; None if nothing has that a line shows."""
        before, after = self._before, _snapshot(self._graph)
        self._before = after
        changed = [node for node in {**before, **after} if not _is_kept(before.get(node), after.get(node))]
        groups = [*_groups(changed, before, after), *_groups(changed, before, after, is_split=False)]
        if not groups:
            return None
        return _example(min(groups, key=lambda group: _rank(group, before, after)), before, after)


def _example(group: list[fx.Node], before: Snapshot, after: Snapshot) -> EditExample:
    shown = dict.fromkeys(_part_that_fits(group, before, after))
    sides = [[node for node in calls if node in shown] for calls in (before, after)]
    places = (place_of(node) for nodes in reversed(sides) for node in nodes)
    place = next((found for found in places if found.line or found.module), Place(""))
    one, other = (
        tuple(_line(node, calls[node]) for node in nodes) for nodes, calls in zip(sides, (before, after), strict=True)
    )
    return EditExample(place, one, other, len(group) - len(shown))


def _snapshot(graph: fx.Graph) -> Snapshot:
    return {node: _call_of(node) for node in graph.nodes}


def _call_of(node: fx.Node) -> _Call:
    return _Call(node.target, node.args, node.kwargs, node.meta.get("val"), node.meta.get("recompute"))


def _is_kept(old: _Call | None, new: _Call | None) -> bool:
    return old is not None and old.is_same(new)


def _groups(
    changed: Iterable[fx.Node], before: Snapshot, after: Snapshot, *, is_split: bool = True
) -> Iterator[list[fx.Node]]:
    """The changed nodes that read one another, before or after, each group from its first node outwards.

    If it `is_split`, those of the forward are apart from those of the backward, which would make an example long.
    """
    near: dict[fx.Node, list[fx.Node]] = {node: [] for node in changed if node.op != "output"}
    for calls in (before, after):
        backward = _backward(calls) if is_split else set()
        for node in near:
            for other in calls[node].operands() if node in calls else ():
                if other in near and (node in backward) == (other in backward):
                    near[node].append(other)
                    near[other].append(node)
    seen: set[fx.Node] = set()
    for start in near:
        if start not in seen:
            yield _reached(start, near, seen)


def _backward(calls: Snapshot) -> set[fx.Node]:
    """As `nodes.backward_nodes`, of a graph that may be gone."""
    found = {node for node in calls if is_tangent(node)}
    for node, call in calls.items() if found else ():
        if not found.isdisjoint(call.operands()):
            found.add(node)
    return found


def _reached(start: fx.Node, near: Mapping[fx.Node, list[fx.Node]], seen: set[fx.Node]) -> list[fx.Node]:
    """The nodes that `start` is connected with, the nearest first; they are `seen` then."""
    found = [start]
    seen.add(start)
    for node in found:
        new = [other for other in dict.fromkeys(near[node]) if other not in seen]
        seen.update(new)
        found += new
    return found


def _part_that_fits(group: list[fx.Node], before: Snapshot, after: Snapshot) -> list[fx.Node]:
    """The nodes nearest to the first of a group that are at most `MAX_LINES` lines of each side."""
    found, lines = [], [0, 0]
    for node in group:
        is_in = [node in before, node in after]
        if all(not there or count < MAX_LINES for there, count in zip(is_in, lines, strict=True)):
            found.append(node)
            lines = [count + there for there, count in zip(is_in, lines, strict=True)]
    return found


def _rank(group: list[fx.Node], before: Snapshot, after: Snapshot) -> tuple[bool, bool, bool]:
    """The first with the least: operators come or go, both sides have lines, none is left out."""
    are_operands_only = all(node in before and node in after for node in group)
    has_both = all(any(node in calls for node in group) for calls in (before, after))
    return are_operands_only, not has_both, len(_part_that_fits(group, before, after)) < len(group)


def _line(node: fx.Node, call: _Call) -> str:
    tag = f"  # {_TAGS[call.tag]}" if call.tag in _TAGS else ""
    return f"{node_line(node, call.target, call.args, call.kwargs, call.value)}{tag}"
