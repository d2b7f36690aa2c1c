"""The peak memory of a program, estimated from its graph in milliseconds, without a compiler.

    peak = arguments + results + most temporaries held at once, less those kept in vector memory + code

Arguments and results are exact. Code size follows from the matmuls: 0.7 to 0.8 MiB each if they are large (widths of
512 and more, 2048 tokens and more, by the v5e's compiler), a quarter of the bytes they read and write if small.
`buffers.py` has the rules for which values are temporaries. They follow the graph's order, except that a node without
readers (a weight's gradient) runs as soon as it can.

docs/measurements.md has the error against the TPU's compiler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import hint_int

from kp_dynamo.graph.buffers import MATMUL_PACKETS, Buffers
from kp_dynamo.graph.nodes import fake_of
from kp_dynamo.graph.op_tables import is_one_of
from kp_dynamo.graph.sizes import node_bytes

kp = torch.ops.kp

_ATTENTION_MATMULS = {
    kp.attention: 2, kp.attention_train: 2, kp.attention_backward: 5,
    kp.flash_attention: 1, kp.flash_attention_train: 1, kp.flash_attention_backward: 2,  # kernels
}  # fmt: skip
# Blocks of logits held at once, by the v5e's compiler.
_BLOCKS_HELD = {kp.linear_cross_entropy: 2, kp.linear_cross_entropy_backward: 1}
_MOST_CODE = 3 << 18  # bytes of code for one matmul


@dataclass(frozen=True)
class PeakMemory:
    """Estimated bytes of a program.

    Attributes:
        arguments: Inputs that are used.
        results: Outputs that are not inputs.
        temporaries: The most that other values hold at once.
        code: The program itself.
    """

    arguments: int
    results: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        return self.arguments + self.results + self.temporaries + self.code


def peak_memory(graph: fx.Graph, vmem_bytes: int, *, narrow_matmuls: bool = True) -> PeakMemory:
    """Estimate the peak memory of a forward, backward or inference graph.

    Args:
        graph: An ATen graph of static shapes, or of symbolic ones with hints.
        vmem_bytes: Vector memory of the chip. Half of it holds temporaries, fusions use the rest.
        narrow_matmuls: Whether matmuls read their float32 operands as bfloat16: at matmul precision "default".
    """
    buffers = Buffers(graph, narrow_matmuls)
    arguments = sum(node_bytes(n) for n in graph.nodes if n.op == "placeholder" and n.users)
    # A head runs when a forward holds nothing else that its backward does not read, and first in a backward.
    most = max([_most_held(buffers), *map(_logits_bytes, graph.nodes)])
    held = max(0, most - vmem_bytes // 2)
    return PeakMemory(arguments, buffers.result_bytes, held, code_bytes(graph))


def _logits_bytes(node: fx.Node) -> int:
    """Bytes of the logits that a head holds at once; 0 for any other node."""
    held = next((num for op, num in _BLOCKS_HELD.items() if is_one_of(node, (op,))), 0)
    if not held:
        return 0
    arguments: Any = node.args
    x, weight, *_, block = arguments[:7] if held == 2 else arguments[1:8]
    num_rows, num_classes = hint_int(fake_of(x).shape[0], fallback=1), int(fake_of(weight).shape[0])
    if _is_kept(node):  # the logits are one block, and the backward does not compute them
        return 4 * num_rows * num_classes if held == 2 else 0
    return int(held * 4 * num_rows * min(block, num_classes))


def _is_kept(head: fx.Node) -> bool:
    """Whether the backward of a head reads the exponentials of its logits."""
    if head.kwargs.get("keep"):
        return bool(head.meta["val"][3].numel())
    kept = head.args[12:13]
    return bool(kept and kept[0] is not None and fake_of(kept[0]).numel())  # type: ignore[arg-type]


def code_bytes(graph: fx.Graph) -> int:
    """The size of the code of a program, estimated from its matmuls."""
    return sum(_code_bytes(n) for n in graph.nodes if _num_matmuls(n))


def _num_matmuls(node: fx.Node) -> int:
    if is_one_of(node, MATMUL_PACKETS):
        return 1
    return next((num for op, num in _ATTENTION_MATMULS.items() if is_one_of(node, (op,))), 0)


def _code_bytes(node: fx.Node) -> int:
    touched = node_bytes(node) + sum(map(node_bytes, node.all_input_nodes))
    return min(_MOST_CODE * _num_matmuls(node), touched // 4)


def _most_held(buffers: Buffers) -> int:
    """Bytes of temporaries at the peak."""
    needs = {n: buffers.read_by(n) for n in buffers.sizes}
    left = Counter(source for sources in needs.values() for source in sources)
    now = most = 0
    for node in _schedule(needs):
        is_result, size = node in buffers.results, buffers.sizes[node]
        now += 0 if is_result else size
        most = max(most, now)
        for source in needs[node]:
            left[source] -= 1
            now -= buffers.sizes[source] if left[source] == 0 and source not in buffers.results else 0
        now -= size if not left[node] and not is_result else 0
    return most


def _schedule(needs: dict[fx.Node, set[fx.Node]]) -> Iterator[fx.Node]:
    """The order of the graph, except that a node without readers (a weight's gradient) runs as soon as it can."""
    readers: dict[fx.Node, list[fx.Node]] = {n: [] for n in needs}
    for node, sources in needs.items():
        for source in sources:
            readers[source].append(node)
    waiting = {n: len(sources) for n, sources in needs.items()}
    done: set[fx.Node] = set()
    for first in needs:
        ready = [first]
        while ready:
            node = ready.pop()
            if node not in done:
                done.add(node)
                yield node
                waiting.update({reader: waiting[reader] - 1 for reader in readers[node]})
                ready += [reader for reader in readers[node] if not readers[reader] and not waiting[reader]]
