"""The pass `rewrite_stem_convolution`."""

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
class RewriteStemConvolution:
    """Make the rows of a strided kernel over few channels its channels: changes only the order of sums.

        before                                              after
        convolution: f32[8, 64, 112, 112] =                 reshape: f32[8, 3, 115, 2, 224] = aten.reshape(...)
            aten.convolution(x, weight, None, [2, 2], ...)  stack: f32[8, 3, 7, 112, 224] = aten.stack([...], 2)
                                                            convolution: f32[8, 64, 112, 112] = aten.convolution(
                                                                ..., [8, 21, 112, 224], weight as [64, 21, 1, 7], ...)

    The first layer of an image model reads 3 channels, of the 128 rows that the matrix unit has. Row i of the kernel
    reads row s * o + i of the image for each row o of the result, so the rows of the image that it reads are a slice of
    the image divided by the stride s. No number is multiplied that the convolution does not multiply, but for the
    zeros of the padding.

    Fires on aten.convolution and the gradients of its weight and bias (aten.convolution_backward), of images with at
    most `most` channels, with a stride of at least 2 from row to row and a kernel of several rows.

    Leaves alone dilation, groups, symbolic sizes, operands that are not contiguous, and gradients of images.

    Attributes:
        most: The most channels of an image.
        copies: How many times as large as the image its rows may be, once they are channels.
    """

    most: int = 4
    copies: int = 4

    name: ClassVar[str] = "rewrite_stem_convolution"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        rewritten, runs = 0, FakeRuns()
        known: dict[Any, fx.Node] = {}
        # In graph order: the rows that the first one inserts stand before the others.
        stems = calls(gm.graph, aten.convolution.default, aten.convolution_backward.default)
        for node in [n for n in stems if self._is_stem(n)]:
            insert = partial(insert_call, gm.graph, kwargs={}, like=node, runs=runs)
            with gm.graph.inserting_before(node):
                _Rewriting(node, insert, known).run()
            rewritten += 1
        return PassReport(self.name, rewritten)

    def _is_stem(self, node: fx.Node) -> bool:
        is_backward = node.target is aten.convolution_backward.default
        args: Any = node.args[1:] if is_backward else node.args
        x, weight, _, stride, padding, dilation, transposed, _, groups, *mask = args
        nodes = node.all_input_nodes
        tensors = [t for t in map(tensor_of, nodes) if t is not None]
        # The stride or the padding may be a size that varies.
        if len(tensors) < len(nodes) or not all(isinstance(s, int) and s > 0 for t in tensors for s in t.shape):
            return False
        return bool(
            not transposed
            and groups == 1
            and tensors[0].is_floating_point()
            and fake_of(x).dim() == 4
            and len(stride) == len(padding) == 2
            and fake_of(x).shape[1] <= self.most
            and stride[0] > 1
            and 1 < fake_of(weight).shape[2] <= self.copies * stride[0]
            and all(d == 1 for d in dilation)
            and all(t.is_contiguous() for t in tensors)
            and not (is_backward and mask[0][0])
        )


class _Rewriting:
    """Replaces one convolution, or its backward."""

    def __init__(self, node: fx.Node, insert: Insert, known: dict[Any, fx.Node]) -> None:
        self.node, self.insert, self.known = node, insert, known
        self.is_backward = node.target is aten.convolution_backward.default
        args: Any = node.args[1:] if self.is_backward else node.args
        self.x, self.weight, self.bias, self.stride, self.padding, *self.rest = args
        self.kernel = fake_of(self.weight).shape[2:]

    def run(self) -> None:
        rows, weight = self._rows(), self._folded(self.weight)
        settings = [1, self.stride[1]], [0, self.padding[1]], *self.rest
        if not self.is_backward:
            made = self.insert(aten.convolution.default, (rows, weight, self.bias, *settings))
            self.node.replace_all_uses_with(made)
            erase_unused(self.node)
            return
        grad = self.node.args[0]
        parts = self.insert(self.node.target, (grad, rows, weight, self.bias, *settings))
        for part in list(self.node.users):
            made = self.insert(part.target, (parts, part.args[1]))
            if part.args[1] == 1:
                made = self.insert(aten.reshape.default, (made, list(fake_of(self.weight).shape)))
            part.replace_all_uses_with(made)
            erase_unused(part)

    def _rows(self) -> fx.Node:
        """[B, C, H, W] -> [B, C * P, H', W]: at [b, c * P + i, o], row `stride * o + i` of the padded image."""
        (b, c, h, w), (first, side), (above, _) = fake_of(self.x).shape, (self.stride[0], self.kernel[0]), self.padding
        key = self.x, first, side, above
        if key not in self.known:
            num_rows = (h + 2 * above - side) // first + 1
            num_groups = -(-max(h + above, first * (num_rows - 1) + side) // first)
            padded = self.insert(aten.constant_pad_nd.default, (self.x, [0, 0, above, first * num_groups - above - h]))
            split = self.insert(aten.reshape.default, (padded, [b, c, num_groups, first, w]))
            taken = [self._row(split, i, num_rows) for i in range(side)]
            stacked = self.insert(aten.stack.default, (taken, 2))
            self.known[key] = self.insert(aten.reshape.default, (stacked, [b, c * side, num_rows, w]))
        return self.known[key]

    def _row(self, split: fx.Node, number: int, count: int) -> fx.Node:
        start = number // self.stride[0]
        part = self.insert(aten.slice.Tensor, (split, 2, start, start + count))
        return self.insert(aten.select.int, (part, 3, number % self.stride[0]))

    def _folded(self, weight: Any) -> fx.Node:
        """[O, C, P, Q] -> [O, C * P, 1, Q]."""
        o, c, p, q = fake_of(weight).shape
        return self.insert(aten.reshape.default, (weight, [o, c * p, 1, q]))
