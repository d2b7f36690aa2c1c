"""The ledger of a capture, and of each of its graphs: measures every pass and says which ones to take back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.nodes import primal_inputs
from kp_dynamo.ledger.autocast_error import autocast_errors
from kp_dynamo.ledger.bounds import bounds, has_narrow, rounding_of
from kp_dynamo.ledger.graph_run import Draws, eagerly, run_graph
from kp_dynamo.ledger.real_inputs import NotComparable, graph_inputs, on_cpu
from kp_dynamo.ledger.relative_errors import Outputs, is_floating
from kp_dynamo.passes.base import Errors, PassErrors

_NO_BACKWARD = "the inputs of a backward graph are known only at a call; the joint graph before it is compared"


class Ledger:
    """The values of one capture, and the error of eager autocast on them.

    Args:
        gm: Dynamo's graph.
        inputs: Its example inputs, which say what requires a gradient.
        values: Their values; None if other pieces of a divided graph compute some of them.
        trains: Whether a backward may follow.
        may_narrow: Whether passes may cast to bfloat16.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        values: Sequence[Any] | None,
        *,
        trains: bool,
        may_narrow: bool,
    ) -> None:
        self._values: list[Any] | None = None
        self._narrow: Errors | str | None
        self._problem, self._narrow = "", None
        held = [*gm.parameters(), *gm.buffers()]
        try:
            if values is None:
                raise NotComparable("another piece of the divided graph computes an input")
            with eagerly():
                given = on_cpu(values)
                self._values = [*on_cpu(held), *given]
        except NotComparable as reason:
            self._problem = str(reason)
            return
        if may_narrow:
            try:
                self._narrow = autocast_errors(gm, inputs, given, trains=trains)
            except NotComparable as reason:
                self._narrow = f"eager autocast cannot be measured, {reason}"

    def of_graph(self, gm: fx.GraphModule, name: str) -> GraphLedger:
        """The ledger of a joint, inference or backward graph that no pass has run on."""
        if name == "backward":
            return GraphLedger(_NO_BACKWARD)
        if self._values is None:
            return GraphLedger(self._problem or "it is compiled at a later call, whose arguments are not compared")
        num_gradients = len(primal_inputs(gm.graph)) if name == "joint" else 0
        return GraphLedger.started(gm, self._values, num_gradients, self._narrow)

    def close(self) -> None:
        """Drop the values."""
        self._values = None


class GraphLedger:
    """The numbers of one graph. It runs the graph after each pass, and keeps what the graph before it returned.

    Args:
        problem: Why nothing is compared; "" if passes are compared.
    """

    _inputs: list[Any]
    _num_gradients: int
    _narrow: Errors | str | None

    def __init__(self, problem: str) -> None:
        self._problem, self._note = problem, ""
        self._draws: Draws = {}
        self._before: Outputs | None = None

    @classmethod
    def started(
        cls, gm: fx.GraphModule, values: Sequence[Any], num_gradients: int, narrow: Errors | str | None
    ) -> GraphLedger:
        """The ledger of `gm`.

        Args:
            gm: The graph.
            values: The values of its inputs, without tangents.
            num_gradients: How many of its outputs are gradients.
            narrow: The error of eager autocast, or why it is unknown; None if no pass may cast to bfloat16.
        """
        ledger = cls("")
        ledger._num_gradients, ledger._narrow = num_gradients, narrow
        try:
            with eagerly():
                ledger._inputs = graph_inputs(gm.graph, values)
                ledger._refer_to(gm)
        except NotComparable as reason:
            ledger._problem = str(reason)
        return ledger

    def measure(self, trial: fx.GraphModule, is_changed: bool) -> PassErrors:
        """What a pass did to the numbers, given the graph after it; the caller then keeps or drops that graph.

        A pass that is not taken back is what the next pass is compared with.
        """
        if self._problem:
            return PassErrors(reason=self._problem)
        if not is_changed:
            return PassErrors(reason="the graph is unchanged")
        draws = dict(self._draws)
        try:
            with eagerly():
                after = self._run(trial, draws)
                if draws.keys() != self._draws.keys():
                    self._draws = draws
                    self._refer_to(trial)
                    return PassErrors(reason="it draws random numbers anew; later passes are compared with its graph")
                return self._judged(trial, after)
        except NotComparable as reason:
            self._before = None
            return PassErrors(reason=str(reason))

    def _judged(self, trial: fx.GraphModule, after: Outputs) -> PassErrors:
        before = Errors() if self._before is None else after.errors(self._before)
        exact = after.errors(self._exact)
        limit, reasons = self._limit(trial), [self._note]
        if (numbers := self._integers(after)) is not None:
            reasons.append(numbers)
        is_over = numbers == _CHANGED or (limit is not None and exact.exceed(limit))
        if limit is None:
            reasons.append(f"no bound: {self._narrow}; it is the bound of later passes")
            self._narrow = exact
        if not is_over:
            self._before = after
        return PassErrors(before, exact, limit or Errors(), is_over, "; ".join(filter(None, reasons)))

    def _limit(self, trial: fx.GraphModule) -> Errors | None:
        """The bound; None if that is the error of eager autocast, which is unknown."""
        if self._narrow is None or not has_narrow(trial.graph):
            return bounds(self._own, self._counts, self._rounding)
        if isinstance(self._narrow, str):
            return None
        return bounds(self._narrow.at_least(self._own), self._counts, rounding_of(trial.graph))

    def _refer_to(self, gm: fx.GraphModule) -> None:
        """Compare later passes with `gm`."""
        self._before = self._run(gm, self._draws)
        self._rounding = rounding_of(gm.graph)
        self._counts = self._before.counts()
        self._exact, self._note = self._before, ""
        try:
            exact = self._run(gm, self._draws, in_float64=True)
        except NotComparable as reason:
            self._note = f"compared with the captured graph in place of float64, {reason}"
        else:
            if self._before.errors(exact).are_finite:
                self._exact = exact
            else:
                self._note = "compared with the captured graph in place of float64: it overflows in its own dtypes"
        self._own = self._before.errors(self._exact)
        self._whole = _results_of_integers(gm.graph)

    def _run(self, gm: fx.GraphModule, draws: Draws, *, in_float64: bool = False) -> Outputs:
        outputs = run_graph(gm, self._inputs, draws, in_float64=in_float64)
        num_results = len(outputs) - self._num_gradients
        return Outputs(outputs[:num_results], outputs[num_results:])

    def _integers(self, after: Outputs) -> str | None:
        """A remark about the integer results, or None."""
        if self._before is None:
            return None
        pairs = list(zip(after.results, self._before.results, strict=True))
        if not all(_is_same(*pairs[i]) for i in self._whole):
            return _CHANGED
        others = [pair for i, pair in enumerate(pairs) if i not in self._whole and not is_floating(pair[1])]
        is_left_out = any(isinstance(b, torch.Tensor) and not _is_same(a, b) for a, b in others)
        return "integers computed from rounded numbers differ; they have no bound" if is_left_out else None


_CHANGED = "a result computed from integers alone changed"


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _results_of_integers(graph: fx.Graph) -> list[int]:
    """Positions of the results that depend on no floating-point tensor: every pass must keep them."""
    floating: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(map(is_floating, values)) or not floating.isdisjoint(node.all_input_nodes):
            floating.add(node)
    results: Any = graph.output_node().args[0]
    return [i for i, r in enumerate(results) if isinstance(r, fx.Node) and r not in floating]
