"""The pass `recompute_activations`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from kp_dynamo.graph.editing import FakeRuns, cast_to, insert_call
from kp_dynamo.graph.nodes import backward_nodes, calls
from kp_dynamo.graph.op_tables import VIEWS, VIEWS_AND_CASTS
from kp_dynamo.ops.compute_dtype import compute_dtype
from kp_dynamo.ops.linear_act import ACTIVATIONS
from kp_dynamo.passes.base import PassReport
from kp_dynamo.passes.recompute.tags import tag

aten, kp = torch.ops.aten, torch.ops.kp


@dataclass(frozen=True)
class RecomputeActivations:
    """Let a backward recompute an activation from its pre-activation, rounded as by autocast; nothing else changes.

        forward                                                 saved for the backward
        linear_act_train = kp.linear_act_train(x, w, b, "gelu") before: getitem (for the gradient of w2), getitem_1
        getitem, getitem_1 = its result, its pre-activation     after: getitem_1
        mm = aten.mm(getitem, w2)
                                                                backward
                                                                wide = aten._to_copy(getitem_1, f32)
                                                                narrow = aten._to_copy(aten.gelu(wide), bf16)
                                                                mm_1 = aten.mm(grad_t, narrow)

    The gradient of the weights after an activation reads its result; the gradient of the activation reads its
    pre-activation. The partitioner saves both, because the result comes from a matmul. Recomputing it is pointwise work
    on a saved value, and shares the exponentials of the activation's own gradient.

    Fires on the result of a kp::linear_act_train, and on views and casts of it, if a backward reads them. The forward
    still reads the result, rounded once. The backward's value is computed from the saved pre-activation: in bfloat16 it
    is rounded twice, which is what eager autocast saves. In float32 the value is the same.

    Leaves alone

    1. gated results (SiLU(gate) * up): a v5e's compiler then takes 2.78 / 2.07 ms for a Llama's training step instead
       of 2.67 / 2.02 (cycles / modelled), and 10 MiB less, of 351;
    2. a result that the graph returns: it exists anyway;
    3. float64, for which torch_xla 2.9 writes the constants of GELU as float32;
    4. nodes that the user's own checkpoints, or an earlier pass, have tagged.

    docs/measurements.md has the measured effect.
    """

    name: ClassVar[str] = "recompute_activations"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        backward, runs = backward_nodes(gm.graph), FakeRuns()
        order = {node: i for i, node in enumerate(gm.graph.nodes)}
        rewritten = 0
        for matmul in calls(gm.graph, kp.linear_act_train.default):
            parts = {user.args[1]: user for user in matmul.users}
            if len(parts) < 2 or "multiplier" in matmul.kwargs or parts[1].meta["val"].dtype == torch.float64:
                continue
            recomputed = _Recomputed(matmul, parts[0], parts[1], runs)
            readers = sorted(_read_by(recomputed.result, backward), key=lambda pair: order[pair[1]])
            if not readers or _is_kept(recomputed.result) or "recompute" in matmul.meta:
                continue
            with gm.graph.inserting_before(readers[0][1]):
                for value, reader in readers:
                    reader.replace_input_with(value, recomputed.of(value))
            tag(recomputed.made, CheckpointPolicy.MUST_RECOMPUTE)
            rewritten += 1
        return PassReport(self.name, rewritten)


def _read_by(value: fx.Node, backward: set[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs of the value, or a view or cast of it, and the backward node that reads it."""
    for user in list(value.users):
        if user in backward:
            yield value, user
        elif user.target in VIEWS_AND_CASTS:
            yield from _read_by(user, backward)


def _is_kept(value: fx.Node) -> bool:
    return any(user.op == "output" or (user.target in VIEWS and _is_kept(user)) for user in value.users)


class _Recomputed:
    """The result of a kp::linear_act_train, recomputed from its pre-activation."""

    def __init__(self, matmul: fx.Node, result: fx.Node, pre: fx.Node, runs: FakeRuns) -> None:
        self._matmul, self.result, self._pre, self._runs = matmul, result, pre, runs
        self.made: list[fx.Node] = []
        self._values: dict[fx.Node, fx.Node] = {}

    def of(self, value: fx.Node) -> fx.Node:
        """The backward's replacement for the result, or for a view or cast of it."""
        if value not in self._values:
            self._values[value] = self._activated() if value is self.result else self._moved(value)
        return self._values[value]

    def _activated(self) -> fx.Node:
        wide = compute_dtype(self._pre.meta["val"].dtype)
        activation = ACTIVATIONS[str(self._matmul.args[3])]
        value = self._call(activation.op, (self._cast(self._pre, wide),), activation.options)
        return self._cast(value, self.result.meta["val"].dtype)

    def _moved(self, value: fx.Node) -> fx.Node:
        return self._call(value.target, (self.of(value.args[0]), *value.args[1:]), value.kwargs)  # type: ignore[arg-type]  # a view of a tensor

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        made = cast_to(node, dtype, like=self._pre, runs=self._runs)
        self.made += [made] if made is not node else []
        return made

    def _call(self, target: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> fx.Node:
        node = insert_call(self._matmul.graph, target, args, options, like=self._pre, runs=self._runs)
        self.made.append(node)
        return node
