"""Runs an ATen graph eagerly on the CPU, in its own dtypes or in float64, with the same random numbers each time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from kp_dynamo.graph.unrepeatable import is_random
from kp_dynamo.ledger.float64 import call_in_float64, raised
from kp_dynamo.ledger.real_inputs import NotComparable

Draws = dict[str, Any]
"""What each random node drew, by its name."""

# Random operators whose other operands are only sizes and probabilities: what they drew may be used again.
_PURE = (
    "rand",
    "randn",
    "randint",
    "rand_like",
    "randn_like",
    "randint_like",
    "randperm",
    "bernoulli",
    "uniform",
    "normal_functional",
    "exponential",
    "geometric",
    "cauchy",
    "log_normal",
    "multinomial",
)


def run_graph(gm: fx.GraphModule, inputs: Sequence[Any], draws: Draws, *, in_float64: bool = False) -> list[Any]:
    """The outputs of a graph.

    Args:
        gm: The graph.
        inputs: The values of its placeholders; they are not written to.
        draws: The random numbers to use again; new ones are added.
        in_float64: Whether to raise all floating-point numbers to float64.

    Raises:
        NotComparable: An operator cannot run like this.
    """
    if any(_is_mutable(node) for node in gm.graph.nodes):
        inputs = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
    with eagerly(), torch.no_grad():
        outputs = _Run(gm, draws, in_float64=in_float64).run(*inputs, enable_io_processing=False)
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Compute with real tensors, also while AOTAutograd traces; restore torch's random state."""
    has_mkldnn = torch._C._get_mkldnn_enabled()
    with (
        _disable_current_modes(),
        torch._C._DisablePythonDispatcher(),
        torch.inference_mode(False),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=[]),
    ):
        # Tracing disables it, but eager's bfloat16 matmuls use it.
        torch._C._set_mkldnn_enabled(True)
        try:
            yield
        finally:
            torch._C._set_mkldnn_enabled(has_mkldnn)


def is_pure_draw(target: Any) -> bool:
    """Whether a random operator draws numbers that do not depend on the values of its operands."""
    return target._schema.name.rpartition("::")[2].rstrip("_") in _PURE


def draws_nothing(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call of a random operator draws nothing, because it drops nothing."""
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            value = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(value == 0)
    return False


class _Run(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, draws: Draws, *, in_float64: bool) -> None:
        super().__init__(gm)
        self._draws, self._in_float64 = draws, in_float64
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        try:
            return self._drawn(n) if is_random(n) else super().run_node(n)
        except NotComparable:
            raise
        except Exception as cause:
            # An operator may raise anything; the graph is compiled all the same.
            text = str(cause).strip().splitlines() or [""]
            raise NotComparable(f"{n.name} raised {type(cause).__name__}: {text[0]}") from cause

    def _drawn(self, n: fx.Node) -> Any:
        if draws_nothing(n.target, n.args, n.kwargs):
            return super().run_node(n)
        if not is_pure_draw(n.target):
            raise NotComparable(f"{n.target} computes with random numbers that it draws itself")
        if n.name not in self._draws:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            self._draws[n.name] = n.target(*args, **kwargs)  # type: ignore[operator]  # a random node calls an operator
        return self._cast(self._draws[n.name])

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._cast(super().placeholder(target, args, kwargs))

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self._cast(tree_map_only(torch.Tensor, torch.Tensor.detach, value))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if self._in_float64:
            return call_in_float64(target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def _cast(self, value: Any) -> Any:
        return raised(value) if self._in_float64 else value


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
