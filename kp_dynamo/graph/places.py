"""Where in the user's model a node comes from, and how a report shows it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from torch import fx

from kp_dynamo.graph.module_paths import module_of
from kp_dynamo.graph.source_lines import source_line
from kp_dynamo.ops.at_true_sizes import name_of

_LIBRARY = re.compile(r"[^:]*/(?:(?:site|dist)-packages|lib(?:64)?/python3(?:\.\d+)?)/")
_IS_IN_FILE = re.compile(r":\d+ in ")


@dataclass(frozen=True)
class Place:
    """A place in the user's model.

    Attributes:
        line: As `source_line` gives it, with the full path of the file; "" if unknown.
        module: As `module_of` gives it; "" if no module was traced.
    """

    line: str
    module: str = ""

    def text(self, verbose: bool = False) -> str:
        """ "at model.py:12 in forward" for a line of the user, "in layers.0.attn (Attention)" for one of a library.

        A library's line is the same in every layer, so only the module tells where in the model it is. `verbose` gives
        both. A place without a module has only its line. "" if nothing is known.
        """
        if not _IS_IN_FILE.search(self.line):
            module = self.module or self.line.removeprefix("module ")
            return f"in {module}" if module else ""
        at_line = f"at {short_line(self.line)}"
        if not self.module:
            return at_line
        if verbose:
            return f"in {self.module}, {at_line}"
        return f"in {self.module}" if self.is_in_library else at_line

    @property
    def is_in_library(self) -> bool:
        """Whether the line is in an installed package, in the standard library, or unknown outside of torch."""
        return not _IS_IN_FILE.search(self.line) or _LIBRARY.match(self.line) is not None


def place_of(node: fx.Node) -> Place:
    """The place that a node was traced from."""
    return Place(source_line(node), module_of(node))


def modules_at(graph: fx.Graph, op: str, line: str) -> tuple[str, ...]:
    """The modules that run the operator `op` at a line, in the order of the graph."""
    nodes = (n for n in graph.nodes if n.op == "call_function" and name_of(n) == op and source_line(n) == line)
    return tuple(dict.fromkeys(module for node in nodes if (module := module_of(node))))


def unnumbered(line: str) -> str:
    """ "model.py in forward" of "model.py:12 in forward": an edit above the line changes its number."""
    return re.sub(r":\d+(?= in |$|: )", "", short_line(line), count=1)


def short_line(line: str) -> str:
    """A line without the folder of its library, or without the working directory if the file is below that.

    "/usr/lib/python3/dist-packages/timm/layers/mlp.py:44 in forward" becomes "timm/layers/mlp.py:44 in forward".
    """
    if library := _LIBRARY.match(line):
        return line[library.end() :]
    return line.removeprefix(os.getcwd() + os.sep)
