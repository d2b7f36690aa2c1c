"""The compared variants: eager, stock openxla, and kp_tpu with various options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch_xla

import kp_dynamo
from bench.workloads import Workload


@dataclass(frozen=True)
class Variant:
    """A way to run a model. `backend` None is eager on the CPU: on the XLA device eager is not a mode of its own.

    `by_child`: repeated child modules are compiled by themselves (`compile_blocks`).
    """

    name: str
    backend: str | Callable[..., Any] | None
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    by_child: bool = False

    @property
    def is_eager(self) -> bool:
        return self.backend is None

    def compiled(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """`model` as this variant runs it."""
        if self.backend is None:
            return model
        if self.by_child:
            assert isinstance(model, torch.nn.Module)
            return kp_dynamo.compile_blocks(model, options=self.options)
        return torch.compile(model, backend=self.backend, options=self.options or None)

    def device(self) -> torch.device:
        """Where this variant runs: eager on the CPU, the others on the XLA device."""
        return torch.device("cpu") if self.is_eager else torch_xla.device()

    def placed(self, workload: Workload) -> Workload:
        """The workload on this variant's device."""
        placed = workload.on(self.device())
        settle()
        return placed


def settle() -> None:
    """Run torch_xla's pending operations, so that no later measurement includes them."""
    torch_xla.sync(wait=True)


def _forward_only(gm: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
    return gm.forward


EAGER = Variant("eager", None)
OPENXLA = Variant("openxla", "openxla")
KP_TPU = Variant("kp_tpu", "kp_tpu")
KP_TPU_FLOAT32 = Variant("kp_tpu float32", "kp_tpu", {"precision": "float32"})
KP_TPU_BLOCKS = Variant("kp_tpu float32, blocks on", "kp_tpu", {"precision": "float32", "blocks": "on"})
KP_TPU_CHILDREN = Variant("kp_tpu float32, compile_blocks", "kp_tpu", {"precision": "float32"}, by_child=True)
DYNAMO_ONLY = Variant("Dynamo alone", _forward_only)

VARIANTS = {v.name: v for v in (EAGER, OPENXLA, KP_TPU, KP_TPU_FLOAT32, KP_TPU_BLOCKS, KP_TPU_CHILDREN, DYNAMO_ONLY)}
