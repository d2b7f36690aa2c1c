"""Graphs for tests: trace a small function as the backend would, and print it in stable text."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import default_partition

from kp_dynamo.graph.editing import check_values
from kp_dynamo.passes.base import GraphPass, PassReport

_DTYPES = {
    torch.float32: "f32", torch.bfloat16: "bf16", torch.float64: "f64", torch.float16: "f16",
    torch.int64: "i64", torch.int32: "i32", torch.bool: "b8", torch.complex64: "c64",
}  # fmt: skip


def trace_inference(
    fn: Callable[..., object], *args: torch.Tensor, decompositions: dict | None = None
) -> fx.GraphModule:
    """The functional ATen graph of `fn(*args)` under no_grad."""
    captured: list[fx.GraphModule] = []

    def compiler(gm: fx.GraphModule, _: list) -> fx.GraphModule:
        captured.append(gm)
        return gm

    with torch.no_grad():
        aot_function(fn, fw_compiler=compiler, decompositions=decompositions)(*args)
    return captured[0]


def trace_joint(fn: Callable[..., object], *args: torch.Tensor, decompositions: dict | None = None) -> fx.GraphModule:
    """The joint forward and backward ATen graph of `fn(*args)`; an argument needs a gradient."""
    captured: list[fx.GraphModule] = []

    def partition(joint: fx.GraphModule, inputs: object, **kwargs: object) -> tuple:
        captured.append(joint)
        return default_partition(joint, inputs, **kwargs)

    aot_function(fn, fw_compiler=lambda gm, _: gm, partition_fn=partition, decompositions=decompositions)(*args)
    return captured[0]


def applied(graph_pass: GraphPass, gm: fx.GraphModule) -> PassReport:
    """Run a pass; the graph is then well formed, says the values that it computes, and runs."""
    report = graph_pass(gm)
    gm.graph.lint()
    check_values(gm.graph)
    gm.recompile()
    return report


def graph_text(gm: fx.GraphModule) -> str:
    """One node a line: `name: bf16[2, 8] = aten.mm.default(a, b)`."""
    return "\n".join(_line(node) for node in gm.graph.nodes)


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    if node.op == "placeholder":
        return f"{node.name}{_kind(node)} = input"
    if node.op == "get_attr":
        return f"{node.name}{_kind(node)} = attribute {node.target}"
    arguments = [str(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
    return f"{node.name}{_kind(node)} = {node.target}({', '.join(arguments)})"


def _kind(node: fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    return f": {_DTYPES.get(value.dtype, value.dtype)}[{', '.join(str(s) for s in value.shape)}]"
