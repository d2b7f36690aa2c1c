"""The module paths of the nodes of a region, for another call of the region.

Dynamo traces a region for one layer. In another layer, the path `layers.0.norm` of a node becomes `layers.1.norm`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

Renames = dict[tuple[str, ...], tuple[str, ...]]
"""The parts of a path -> as many parts to replace them."""

_PART = re.compile(r"\w+")
_NO_PARTS = ("_modules", "_parameters", "_buffers")


def renames_by_operands(first: Sequence[Any], operands: Sequence[Any]) -> Renames:
    """What differs between the sources of the parameters and buffers of the first call, and those of another."""
    sources = [(_source(one), _source(other)) for one, other in zip(first, operands, strict=True)]
    return _renames([(one, other) for one, other in sources if one and other])


def renames_by_stack(inside: Mapping[str, Any], call: Mapping[str, Any]) -> Renames:
    """What differs between the outermost modules of a node in a region and the modules of the call.

    Args:
        inside: The metadata of the node.
        call: The metadata of the call.
    """
    pairs = zip(_stack(inside).values(), _stack(call).values(), strict=False)
    return _renames([(one, other) for (one, kind), (other, kind_of_call) in pairs if kind is kind_of_call])


def renamed_stack(meta: Mapping[str, Any], renames: Renames) -> dict[str, tuple[str, Any]]:
    """The module stack in the metadata of a node, with the paths of another call."""
    return {key: (_renamed(path, renames), kind) for key, (path, kind) in _stack(meta).items()}


def _stack(meta: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    return dict(meta.get("nn_module_stack") or {})


def _source(node: Any) -> str:
    source = getattr(node, "_dynamo_source", None) if isinstance(node, fx.Node) else None
    return "" if source is None else str(source.name())


def _parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in _PART.findall(path) if part not in _NO_PARTS)


def _renames(pairs: Sequence[tuple[str, str]]) -> Renames:
    found: Renames = {}
    for one, other in ((_parts(a), _parts(b)) for a, b in pairs):
        different = [i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
        if different and len(one) == len(other):
            end = different[-1] + 1
            found.setdefault(one[:end], other[:end])
    return found


def _renamed(path: str, renames: Renames) -> str:
    parts = _parts(path)
    known = [end for end in range(len(parts), 0, -1) if parts[:end] in renames]
    if not known:
        return path
    new = iter(renames[parts[: known[0]]])
    return _PART.sub(lambda m: m[0] if m[0] in _NO_PARTS else next(new, m[0]), path)
