"""Refuses nested tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from kp_dynamo.exceptions import XLACompilationError
from kp_dynamo.graph.source_lines import user_line


def refuse_nested_tensors(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Raise if an input or a value of Dynamo's graph is a nested tensor.

    Raises:
        XLACompilationError: One is.
    """
    made = next((node for node in gm.graph.nodes if _is_nested(node.meta.get("example_value"))), None)
    if made is None and not any(map(_is_nested, inputs)):
        return
    if made is None or made.op == "placeholder":
        what = "an input is a nested tensor"
    else:
        what = f"{made.name} is a nested tensor{user_line(made)}"
    raise XLACompilationError(
        f"{what}, whose rows have different lengths; XLA has dense tensors only. Try: pass its values() and offsets(), "
        "pad it with x.to_padded_tensor(0), or keep it out of the compiled region with torch.compiler.disable."
    )


def _is_nested(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_nested
