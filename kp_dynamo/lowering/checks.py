"""What no lowering takes, said before anything is traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from kp_dynamo.exceptions import XLACompilationError
from kp_dynamo.graph.source_lines import user_line
from kp_dynamo.lowering.base import LoweringSpec
from kp_dynamo.ops.at_true_sizes import name_of


def check_layouts(gm: fx.GraphModule) -> None:
    """Raise where a tensor of the graph is not dense."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise XLACompilationError(
                f"{node.target} gives a tensor of layout {value.layout}{user_line(node)}, which XLA does not have. "
                "Allowed: torch.strided. Keep sparse tensors out of the compiled region with torch.compiler.disable."
            )
        if isinstance(value, torch.Tensor) and value.dtype in _NO_DTYPES:
            raise XLACompilationError(
                f"{node.target} gives a tensor of dtype {value.dtype}{user_line(node)}, which torch_xla does not have. "
                "Allowed: bool, integers, float16, bfloat16, float32, float64, complex64, complex128. Cast it before."
            )


# Kernels for every device.
_ANYWHERE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
# torch_xla 2.9 knows them not, or under no name.
_NO_DTYPES = (torch.complex32, torch.quint8, torch.qint8, torch.qint32)


def check_runs_somewhere(missing: list[fx.Node], spec: LoweringSpec) -> None:
    """Raise where operators that XLA lacks may not, or cannot, run on the CPU."""
    for node in missing:
        name = node.target.name() if isinstance(node.target, torch._ops.OpOverload) else ""
        keys = ("CPU", *_ANYWHERE)
        if not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys):
            raise XLACompilationError(
                f"{node.target} can run neither on XLA nor on the CPU{user_line(node)}. "
                "Give the operator a CPU kernel, or keep it out of the compiled region with torch.compiler.disable."
            )
    if spec.strict:
        listed = "; ".join(f"{name_of(n)}{user_line(n)}" for n in missing)
        raise XLACompilationError(
            f"strict=True and XLA has no lowering for: {listed}. "
            "Rewrite these lines with operators that XLA has, or allow the CPU with strict=False."
        )


def check_donation(kept: Sequence[tuple[int, str]], args: Sequence[Any], spec: LoweringSpec) -> None:
    """Raise where a buffer that could be donated has to be kept, and the user wants to hear of it."""
    if spec.strict and kept:
        listed = "; ".join(f"{args[i].dtype} {list(args[i].shape)}, because {reason}" for i, reason in kept)
        raise XLACompilationError(
            f"strict=True and donate='mutated', and tensors that the {spec.name} graph overwrites keep their buffers: "
            f"{listed}. Change these lines, or allow it with strict=False."
        )
