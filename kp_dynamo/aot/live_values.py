"""What lives at the peak of a step, by kind and module of the model; equal layers are one row.

It is counted from the graphs: the values between programs, and the arguments of the program that runs. What a program
needs beyond that (temporaries, results, its code) is in the compiler's figures alone, without modules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from kp_dynamo.explanation.graph_reports import PieceReport
from kp_dynamo.graph.module_paths import of_any_layer, paths_of_runs
from kp_dynamo.lowering.step_memory import Live, Owner


@dataclass(frozen=True)
class LiveValues:
    """Live tensors of one kind and module, or of equal modules.

    Attributes:
        kind: "parameters", "buffers", "inputs", "activations" or "gradients".
        module: The path of the module, with "*" for the numbers of equal layers; "" for none.
        num_modules: How many modules that is.
        num_bytes: Of all of them, without padding.
    """

    kind: str
    module: str
    num_modules: int
    num_bytes: int


def live_values(live: Live, piece_of: Callable[[object], PieceReport | None]) -> tuple[LiveValues, ...]:
    """The live tensors, the largest first.

    Args:
        live: The tensors.
        piece_of: The piece of a divided graph that a program computes; None for a whole graph.
    """
    sizes: defaultdict[tuple[str, str], int] = defaultdict(int)
    for owner, size in live:
        sizes[owner.kind, _path(owner, piece_of(owner.program))] += size
    return tuple(sorted(_folded(sizes), key=lambda row: -row.num_bytes))


def _path(owner: Owner, piece: PieceReport | None) -> str:
    """The path of the layer that the run computes: the graph has that of the first one."""
    paths = paths_of_runs(owner.module, piece.modules, piece.layers) if piece else []
    if not paths:
        return owner.module
    # A backward runs the layers from the last to the first.
    run = len(paths) - 1 - owner.run if owner.kind == "gradients" else owner.run
    return paths[run % len(paths)]


def _folded(sizes: Mapping[tuple[str, str], int]) -> Iterator[LiveValues]:
    alike: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for kind, path in sizes:
        alike[kind, of_any_layer(path)].append(path)
    for (kind, pattern), paths in alike.items():
        name = pattern if len(paths) > 1 else paths[0]
        yield LiveValues(kind, name, len(paths), sum(sizes[kind, path] for path in paths))


def by_part(rows: Iterable[LiveValues]) -> dict[str, int]:
    """The bytes of all kinds by part of equal layers, such as "layers.*.mlp", and by module outside; largest first."""
    sizes: defaultdict[str, int] = defaultdict(int)
    for row in rows:
        names = of_any_layer(row.module).split(".")
        depth = names.index("*") + 2 if "*" in names else len(names)
        sizes[".".join(names[:depth])] += row.num_bytes
    return dict(sorted(sizes.items(), key=lambda part: -part[1]))


def num_bytes(rows: Iterable[LiveValues]) -> int:
    """The bytes of all rows."""
    return sum(row.num_bytes for row in rows)
