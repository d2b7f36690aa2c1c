"""The default lowering: one XLA program a graph, traced with placeholders (see `trace`).

Where XLA lacks an operator, the graph is cut around it: what lies before and after are programs, the
operator itself runs on the CPU, counted and named.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from kp_dynamo.exceptions import XLACompilationError
from kp_dynamo.lowering.base import Executable, LoweringSpec
from kp_dynamo.lowering.constants import device_constants
from kp_dynamo.lowering.cut import cut_around
from kp_dynamo.lowering.program import compile_program
from kp_dynamo.source_lines import source_line, user_line

logger = logging.getLogger(__name__)


class OpenXla:
    """Our bridge onto torch_xla's compile and run entry points."""

    name = "openxla"

    def compile(self, gm: fx.GraphModule, args: Sequence[Any], spec: LoweringSpec) -> Executable:
        _check_layouts(gm)
        run, missing, seconds = compile_program(gm, args, device_constants(gm), spec)
        if run is not None:
            return Executable(run, num_programs=1, seconds=seconds)
        _check_runs_somewhere(missing, spec)
        pieces = cut_around(gm, set(missing), spec)
        pieces.seconds.update(seconds)
        fallbacks = tuple((str(n.target), source_line(n)) for n in missing)
        return Executable(pieces, pieces.num_programs, fallbacks, pieces.seconds, pieces.moved_bytes)


def _check_layouts(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise XLACompilationError(
                f"{node.target} gives a tensor of layout {value.layout}{user_line(node)}, which XLA does not have. "
                "Allowed: torch.strided. Keep sparse tensors out of the compiled region with torch.compiler.disable."
            )


def _check_runs_somewhere(missing: list[fx.Node], spec: LoweringSpec) -> None:
    for node in missing:
        name = node.target.name() if isinstance(node.target, torch._ops.OpOverload) else ""
        keys = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
        if not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys):
            raise XLACompilationError(
                f"{node.target} can run neither on XLA nor on the CPU{user_line(node)}. "
                "Give the operator a CPU kernel, or keep it out of the compiled region with torch.compiler.disable."
            )
    if spec.strict:
        listed = "; ".join(f"{n.target}{user_line(n)}" for n in missing)
        raise XLACompilationError(
            f"strict=True and XLA has no lowering for: {listed}. "
            "Rewrite these lines with operators that XLA has, or allow the CPU with strict=False."
        )
