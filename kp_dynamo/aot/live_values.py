"""What lives at the peak of a step, by kind and module of the model; equal layers are one row.

It is counted from the graphs: the values between programs, and the arguments of the program that runs. What a program
needs beyond that (temporaries, results, its code) is in the compiler's figures alone, without modules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kp_dynamo.graph.module_paths import of_any_layer
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


def live_values(live: Live, modules_of: Callable[[object], Sequence[str]]) -> tuple[LiveValues, ...]:
    """The live tensors, the largest first.

    Args:
        live: The tensors.
        modules_of: The module that each run of a program computes, if it is that of a repeated layer; else ().
    """
    sizes: defaultdict[tuple[str, str], int] = defaultdict(int)
    for owner, size in live:
        sizes[owner.kind, _path(owner, modules_of(owner.program))] += size
    return tuple(sorted(_folded(sizes), key=lambda row: -row.num_bytes))


def _path(owner: Owner, modules: Sequence[str]) -> str:
    """The path of the layer that the run computes: the graph has that of the first one."""
    if len(modules) < 2 or not all(modules) or not f"{owner.module}.".startswith(f"{modules[0]}."):
        return owner.module
    # A backward runs the layers from the last to the first.
    run = len(modules) - 1 - owner.run if owner.kind == "gradients" else owner.run
    return modules[run % len(modules)] + owner.module.removeprefix(modules[0])


def _folded(sizes: Mapping[tuple[str, str], int]) -> Iterator[LiveValues]:
    alike: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for kind, path in sizes:
        alike[kind, of_any_layer(path)].append(path)
    for (kind, pattern), paths in alike.items():
        name = pattern if len(paths) > 1 else paths[0]
        yield LiveValues(kind, name, len(paths), sum(sizes[kind, path] for path in paths))


def num_bytes(rows: Iterable[LiveValues]) -> int:
    """The bytes of all rows."""
    return sum(row.num_bytes for row in rows)
