"""What the captured graphs of a step say about any way to divide a model: the facts that its bounds need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kp_dynamo.aot.step_graphs import StepGraphs
from kp_dynamo.aot.tensor_plan import MatmulPairs
from kp_dynamo.exceptions import TPUConfigurationError, XLACompilationError
from kp_dynamo.planner.bounds import Facts
from kp_dynamo.planner.candidates import Layout
from kp_dynamo.planner.request import PlanRequest
from kp_dynamo.planner.step_facts import Activations, activations, flops_per_sample, parameter_reads
from kp_dynamo.planner.weights import Weights, weights_of
from kp_dynamo.sharding.rules import own_plan


@dataclass
class FactSource:
    """What the captures say about any candidate; each part is computed once.

    Attributes:
        captures: The graphs of a step for each checkpoint mode.
    """

    request: PlanRequest
    captures: Mapping[Any, StepGraphs]
    _refused: dict[str, dict[str, str]] = field(default_factory=dict)
    _found: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._flops = {mode: flops_per_sample(capture) for mode, capture in self.captures.items()}
        self._pairs = MatmulPairs(self.request.model, self.request.args)
        self._reads = {mode: self._least_reads(mode) for mode in self.captures}

    @property
    def useful_flops(self) -> int:
        """FLOPs of a sample without recomputed ones; the modes differ only in what they recompute."""
        return min(flops.useful for flops in self._flops.values())

    @property
    def left_out(self) -> dict[str, str]:
        """For each sharding that is impossible on some meshes, on how many, and why on the first of them."""
        found = {}
        for sharding, reasons in self._refused.items():
            (mesh, reason), *others = reasons.items()
            found[f"{sharding} on {mesh}" + (f" and {len(others)} other meshes" if others else "")] = reason
        return found

    def facts(self, layout: Layout, mode: Any) -> Facts | None:
        """The facts of a layout; None if the model cannot be divided so."""
        try:
            weights = self._weights(layout, mode)
            live = self._activations(mode, layout.model)
        except TPUConfigurationError as problem:
            self._refused.setdefault(layout.sharding, {})[str(layout.mesh)] = str(problem)
            return None
        request = self.request
        return Facts(
            weights, live, self._least_flops(mode), request.samples.rows, request.samples.num_bytes,
            request.state_factor, request.train,
        )  # fmt: skip

    def _least_reads(self, mode: Any) -> Mapping[str, int]:
        """How many programs read each parameter, at least; in the capture of "auto" some only recompute."""
        reads = parameter_reads(self.captures[mode])
        return dict.fromkeys(reads, 1) if mode == "auto" else reads

    def _least_flops(self, mode: Any) -> int:
        """Of a step for one sample; the capture of "auto" recomputes all it can, and the compiled one may not."""
        flops = self._flops[mode]
        return flops.least if mode != "auto" else max(0, flops.least - flops.recomputed)

    def _weights(self, layout: Layout, mode: Any) -> Weights:
        word = layout.sharding or "data"
        found: Weights = self._once(
            ("weights", layout.data, layout.model, word, mode),
            lambda: weights_of(
                self.request.model, layout.mesh, word, self._reads[mode], self.request.train, self._plan(layout.model)
            ),
        )
        return found

    def _plan(self, model: int) -> Mapping[str, Any] | None:
        """How "tensor" divides a model that brings no plan; None if it brings one, or nothing divides its matmuls."""
        if model == 1 or own_plan(self.request.model):
            return None
        try:
            return self._pairs.plan(model)
        except XLACompilationError as problem:  # some models need more than the batch of one that shows the pairs
            raise TPUConfigurationError(str(problem)) from problem

    def _activations(self, mode: Any, model: int) -> Activations:
        key = ("activations", mode, model)
        found: Activations = self._once(key, lambda: activations(self.captures[mode], model, self._plan(model)))
        return found

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """The value of `make()`, or the error that it raised the first time."""
        if key not in self._found:
            try:
                self._found[key] = make()
            except TPUConfigurationError as problem:
                self._found[key] = problem
        if isinstance(self._found[key], TPUConfigurationError):
            raise self._found[key]
        return self._found[key]
