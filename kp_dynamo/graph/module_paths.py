"""The modules that a node was traced in, by their paths in the model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache

from torch import fx

# Parts of Dynamo's source expressions that do not belong to a module's path.
_NOT_IN_PATHS = ("_modules", "_orig_mod")
# How Dynamo writes an attribute whose name is no identifier.
_GETATTR = re.compile(r"""getattr\((.*), (['"])(.*?)\2\)""")


def module_paths(node: fx.Node) -> Iterator[str]:
    """Paths of the modules that a node was traced in, outermost first: "model", "model.layers.0"."""
    for source, _ in _stack(node):
        yield from _paths(source)


def layer_of(node: fx.Node) -> tuple[str, object]:
    """Path (such as "layers.0") and class of the outermost list item that a node was traced in; path "" if none.

    For a list in a list, the path is that of the outer one. If a layer is not called, but its children are, the class
    is that of a child.
    """
    for source, kind in _stack(node):
        parts = _paths(source)[0].split(".")
        number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if number is not None:
            return ".".join(parts[: number + 1]), kind
    return "", None


def module_of(node: fx.Node) -> str:
    """ "layers.0 (Linear)" for the innermost module, "Gpt" for the model itself, "" if no module was traced."""
    path, name = next(reversed(modules_of(node)), ("", ""))
    return f"{path} ({name})" if path else name


def modules_of(node: fx.Node) -> list[tuple[str, str]]:
    """Path and class of each module that a node was traced in, outermost first; the path of the model itself is ""."""
    return [
        (_paths(source)[0], kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2])
        for source, kind in _stack(node)
    ]


def repeated_modules(runs: Sequence[Sequence[fx.Node]]) -> tuple[str, ...]:
    """Path of the module that each run of a repeated stretch computes: `main_module`, up to where the paths differ.

    Most nodes of a Llama layer are in its attention: ["layers.0.attn", "layers.1.attn"] gives "layers.0", "layers.1".
    """
    paths = [main_module(nodes).split(".") for nodes in runs]
    depths = [depth for depth, names in enumerate(zip(*paths, strict=False), 1) if len(set(names)) > 1]
    return tuple(".".join(path[: depths[-1]] if depths else path) for path in paths)


def paths_of_runs(path: str, modules: Sequence[str], layers: int = 1) -> list[str]:
    """A path in the graph of a repeated piece, in each of its runs; [] if it lies in none of its layers.

    Args:
        path: It has the names of the first run.
        modules: The paths of the modules that the runs compute, one for each layer.
        layers: The number of equal layers in a run.
    """
    if len(modules) < 2 or not all(modules):
        return []
    inside = (n for n, first in enumerate(modules[:layers]) if f"{path}.".startswith(f"{first}."))
    number = next(inside, None)
    return [] if number is None else [m + path.removeprefix(modules[number]) for m in modules[number::layers]]


def main_module(nodes: Sequence[fx.Node]) -> str:
    """Path of the innermost module in which more than half of these nodes were traced, "" for the model itself.

    A repeated stretch need not start where a layer starts, so its nodes may have no layer in common.
    """
    found = Counter(path for node in nodes for path in {_paths(source)[0] for source, _ in _stack(node)})
    paths = [path for path, count in found.items() if path and count > len(nodes) / 2]
    return max(paths, key=lambda path: path.count("."), default="")


def _stack(node: fx.Node) -> list[tuple[str, object]]:
    """Source and class of each module, outermost first; a backward node has those of its forward node."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return list(stack.values())


@lru_cache(maxsize=4096)
def _paths(source: str) -> tuple[str, ...]:
    """The paths that a Dynamo source may have: `L['self']._modules['model'].layers[0]` is "model.layers.0".

    A local name other than self gives two paths, without and with the name: the user may see either as the root.
    """
    while found := _GETATTR.search(source):
        source = f"{source[: found.start()]}{found[1]}.{found[3]}{source[found.end() :]}"
    parts = re.sub(r"""\[['"]?([^\]'"]*)['"]?\]""", r".\1", source).split(".")
    parts = [part for part in parts if part not in _NOT_IN_PATHS]
    if parts[0] not in ("L", "G") or len(parts) < 2:
        return (".".join(parts),)
    inside = ".".join(parts[2:])
    return (inside,) if parts[1] == "self" else (inside, ".".join(parts[1:]))


def of_any_layer(path: str) -> str:
    """A path with "*" for the numbers of layers: "layers.*.attn", also with its class, "layers.*.attn (Attention)"."""
    return _NUMBER.sub("*", path)


_NUMBER = re.compile(r"(?<![^.])\d+(?![^. ])")
