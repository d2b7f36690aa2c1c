"""The pass `rewrite_patch_convolution`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

from kp_dynamo.graph.editing import FakeRuns, Insert, erase_unused, insert_call
from kp_dynamo.graph.nodes import calls, fake_of, tensor_of
from kp_dynamo.passes.base import PassReport

aten = torch.ops.aten


@dataclass(frozen=True)
class RewritePatchConvolution:
    """Compute a convolution whose kernel equals its stride as a matmul of patches: changes only the order of sums.

        before                                                after
        convolution: f32[2, 4, 3, 3] = aten.convolution(      permute: f32[2, 3, 3, 3, 8, 8] = aten.permute(...)
            x, weight, bias, [8, 8], [0, 0], ...)             addmm: f32[18, 4] = aten.addmm(bias, patches, weight.t())
                                                              clone: f32[2, 4, 3, 3] = aten.clone(...)

    Vision transformers embed images so. The TPU's compiler has no good form for a kernel of 16 x 16 over 3 channels.
    A ViT of 2 layers and width 1024 takes a v5e 0.62 modelled ms in inference as a matmul, and 0.71 as a convolution
    (v5p 0.43 and 0.52, v6e 0.31 and 0.33), and a training step 2.13 and 2.22.

    Fires on aten.convolution and aten.convolution_backward of images, with a kernel of at least `least` x `least`, no
    padding, dilation or groups, and sizes that the kernel divides.

    Leaves alone smaller kernels: a DiT's, of 2 x 2, takes the same time. Leaves alone symbolic sizes, and images or
    results that are not contiguous.

    Attributes:
        least: The smallest side of a kernel.
    """

    least: int = 8

    name: ClassVar[str] = "rewrite_patch_convolution"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        rewritten, runs = 0, FakeRuns()
        for target, rewrite in ((aten.convolution.default, _forward), (aten.convolution_backward.default, _backward)):
            for node in [n for n in calls(gm.graph, target) if self._is_of_patches(n)]:
                with gm.graph.inserting_before(node):
                    rewrite(node, partial(insert_call, gm.graph, kwargs={}, like=node, runs=runs))
                rewritten += 1
        return PassReport(self.name, rewritten)

    def _is_of_patches(self, node: fx.Node) -> bool:
        args: Any = node.args if node.target is aten.convolution.default else node.args[1:]
        x, weight, _, stride, padding, dilation, transposed, _, groups, *_ = args
        nodes = (*node.all_input_nodes, *_results(node))
        tensors = [t for t in map(tensor_of, nodes) if t is not None]
        # The stride or the padding may be a size that varies.
        if len(tensors) < len(nodes) or not all(isinstance(s, int) and s > 0 for t in tensors for s in t.shape):
            return False
        kernel, sizes = list(fake_of(weight).shape[2:]), fake_of(x).shape[2:]
        is_plain = not transposed and groups == 1 and not any(padding) and all(d == 1 for d in dilation)
        return bool(
            is_plain
            and tensors[0].is_floating_point()
            and len(kernel) == 2
            and list(stride) == kernel
            and min(kernel) >= self.least
            and all(size % side == 0 for size, side in zip(sizes, kernel, strict=True))
            and all(t.is_contiguous() for t in tensors)
        )


def _results(node: fx.Node) -> list[fx.Node]:
    """The results of a node."""
    found = [node] if isinstance(node.meta["val"], torch.Tensor) else node.users
    return [n for n in found if isinstance(n.meta.get("val"), torch.Tensor)]


def _nodes(node: fx.Node) -> tuple[Any, Any, Any]:
    """Its first three arguments."""
    return node.args[:3]  # type: ignore[return-value]  # they are three


def _forward(node: fx.Node, insert: Insert) -> None:
    x, weight, bias = _nodes(node)
    shape = fake_of(node).shape
    rows, columns = _patches(x, weight, insert), insert(aten.t.default, (_matrix(weight, insert),))
    matmul = aten.mm.default if bias is None else aten.addmm.default
    made = insert(matmul, (rows, columns) if bias is None else (bias, rows, columns))
    made = insert(aten.reshape.default, (made, [shape[0], *shape[2:], shape[1]]))
    made = insert(aten.permute.default, (made, [0, 3, 1, 2]))
    node.replace_all_uses_with(_contiguous(made, insert))
    erase_unused(node)


def _backward(node: fx.Node, insert: Insert) -> None:
    grad, x, weight = _nodes(node)
    rows = insert(aten.permute.default, (grad, [0, 2, 3, 1]))
    rows = insert(aten.reshape.default, (rows, [-1, fake_of(weight).shape[0]]))
    for part in list(node.users):
        match part.args[1]:
            case 0:
                made = _image(insert(aten.mm.default, (rows, _matrix(weight, insert))), x, weight, insert)
            case 1:
                made = insert(aten.mm.default, (insert(aten.t.default, (rows,)), _patches(x, weight, insert)))
                made = insert(aten.reshape.default, (made, list(fake_of(weight).shape)))
            case _:
                made = insert(aten.sum.dim_IntList, (grad, [0, 2, 3]))
        part.replace_all_uses_with(made)
        erase_unused(part)
    if not rows.users:  # only the gradient of the bias is read
        erase_unused(rows)


def _patches(x: Any, weight: Any, insert: Insert) -> fx.Node:
    """[B, C, H, W] -> [B * H / P * W / Q, C * P * Q] for a weight [O, C, P, Q]."""
    (b, c, h, w), (p, q) = fake_of(x).shape, fake_of(weight).shape[2:]
    split = insert(aten.reshape.default, (x, [b, c, h // p, p, w // q, q]))
    moved = insert(aten.permute.default, (split, [0, 2, 4, 1, 3, 5]))
    return insert(aten.reshape.default, (moved, [-1, c * p * q]))


def _image(patches: fx.Node, x: Any, weight: Any, insert: Insert) -> fx.Node:
    """The inverse of `_patches`."""
    (b, c, h, w), (p, q) = fake_of(x).shape, fake_of(weight).shape[2:]
    split = insert(aten.reshape.default, (patches, [b, h // p, w // q, c, p, q]))
    moved = _contiguous(insert(aten.permute.default, (split, [0, 3, 1, 4, 2, 5])), insert)
    return insert(aten.reshape.default, (moved, [b, c, h, w]))


def _matrix(weight: Any, insert: Insert) -> fx.Node:
    """[O, C, P, Q] -> [O, C * P * Q]."""
    return insert(aten.reshape.default, (weight, [fake_of(weight).shape[0], -1]))


def _contiguous(node: fx.Node, insert: Insert) -> fx.Node:
    return insert(aten.clone.default, (node,), kwargs={"memory_format": torch.contiguous_format})
