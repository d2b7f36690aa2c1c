"""Run a functional ATen graph on XLA tensors, node by node.

AOTAutograd traced the graph on CPU fake tensors. The interpreter replaces `device=` arguments by the XLA device and
tensor attributes by buffers on it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch import fx

from kp_dynamo.exceptions import TPUBackendError, XLACompilationError
from kp_dynamo.graph.pure_operators import is_user_defined
from kp_dynamo.graph.source_lines import user_line
from kp_dynamo.graph.symbol_values import SymbolReader, evaluated
from kp_dynamo.lowering.cast_forms import is_integer
from kp_dynamo.lowering.fallback import values_forbidden
from kp_dynamo.lowering.forms import form_of
from kp_dynamo.lowering.hidden_constants import ExactForms
from kp_dynamo.lowering.nan_constants import NanForms
from kp_dynamo.lowering.promotion import in_reported_dtype, with_common_dtype

logger = logging.getLogger(__name__)


# torch_xla 2.9 stores these as signed integers and returns those: 40000 comes back as -25536.
_SIGNED_IN_XLA = (torch.uint16, torch.uint32, torch.uint64)

_PLACES = (torch.ops.aten.sym_stride.int, torch.ops.aten.sym_storage_offset.default)

OnNode = Callable[[fx.Node, Any], None]


def ignore(_: fx.Node, __: Any) -> None:
    """An `on_node` that does nothing."""


class XlaInterpreter(fx.Interpreter):
    """Runs a graph's nodes on XLA tensors.

    Args:
        gm: The graph, on CPU fake tensors.
        device: The XLA device.
        constants: Tensor attributes of `gm` by name, already on the device.
        on_fallback: Called with (node, args, kwargs) for an operator that XLA cannot lower; returns a placeholder for
            its result.
        on_node: Called with (node, result) for every operator.
    """

    is_sharded = False

    def __init__(
        self,
        gm: fx.GraphModule,
        device: torch.device,
        constants: dict[str, torch.Tensor],
        on_fallback: Callable[[fx.Node, Any, Any], Any],
        on_node: OnNode = ignore,
    ) -> None:
        super().__init__(gm)
        self._on_node, self._nan_forms, self._exact_forms = on_node, NanForms(gm.graph), ExactForms(gm.graph)
        self._device, self._constants, self._on_fallback = device, constants, on_fallback
        self._symbols: dict[sympy.Symbol, int] = {}
        self._sizes: dict[sympy.Expr, int | None] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        inputs = [node.meta.get("val") for node in self.graph.find_nodes(op="placeholder")]
        self._symbols, self._sizes = SymbolReader(inputs, has_strides=False).read(args), {}
        return super().run(*args, **kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._constants[target] if target in self._constants else super().get_attr(target, args, kwargs)

    def run_node(self, node: fx.Node) -> Any:
        if node.op != "call_function":
            return super().run_node(node)
        result = self._place(node) if node.target in _PLACES else self._call(node)
        self._on_node(node, result)
        return result

    def _place(self, node: fx.Node) -> int:
        """A stride or storage offset of the caller's tensor. Its copy on the device is contiguous."""
        number = self._size(node.meta["val"])
        if number is None:
            raise XLACompilationError(
                f"{node.target}{user_line(node)} reads the memory layout of an argument, which varies and is unknown "
                "on the XLA device. Allowed: strides that follow from sizes. Try: pass the argument as x.contiguous()."
            )
        return number

    def _call(self, node: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self._higher_order(node, args, kwargs)
        args, kwargs = fx.node.map_aggregate((args, kwargs), self._on_device)
        if _creates_on_default_device(node.target):
            kwargs = {"device": self._device, **kwargs}
        args = with_common_dtype(node, args)
        form = self._nan_forms.form_of(node) or self._exact_forms.form_of(node)
        form = form or form_of(node.target, self.is_sharded)
        if form is None and _is_opaque(node.target):
            return self._on_fallback(node, args, kwargs)
        try:
            run: Any = form or node.target
            result = in_reported_dtype(_as_indices(run(*args, **kwargs)))
        except TPUBackendError:
            raise  # our own error, written for the user
        except Exception as error:  # noqa: BLE001
            # The operator ran on fake tensors before, so torch_xla's lowering is what fails.
            logger.debug("%s cannot be lowered for these arguments: %s", node.target, error)
            return self._on_fallback(node, args, kwargs)
        return result if self._is_as_traced(node, result) else self._on_fallback(node, args, kwargs)

    def _is_as_traced(self, node: fx.Node, result: Any) -> bool:
        """Whether dtypes and shapes are those that ATen promises: torch_xla lowers some operators to different ones."""
        promised, given = node.meta.get("val"), result
        if isinstance(promised, torch.Tensor):
            promised, given = [promised], [result]
        if not isinstance(promised, (list, tuple)) or not isinstance(given, (list, tuple)):
            return True
        pairs = [(p, g) for p, g in zip(promised, given, strict=True) if isinstance(p, torch.Tensor)]
        return all(
            g is not None and p.dtype == g.dtype and p.dtype not in _SIGNED_IN_XLA and self._is_shape(p.shape, g.shape)
            for p, g in pairs
        )

    def _is_shape(self, promised: Any, given: Any) -> bool:
        return len(promised) == len(given) and all(
            self._size(p) in (None, g) for p, g in zip(promised, given, strict=True)
        )

    def _size(self, size: Any) -> int | None:
        """A size as a number; None if it does not follow from the arguments."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        expr = size.node.expr
        if expr not in self._sizes:
            try:
                self._sizes[expr] = evaluated(size, self._symbols)
            except KeyError:
                self._sizes[expr] = None
        return self._sizes[expr]

    def _on_device(self, value: Any) -> Any:
        return self._device if isinstance(value, torch.device) else value

    def _higher_order(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.target is torch.ops.higher_order.invoke_subgraph:
            body, _, *operands = args
            return type(self)(body, self._device, {}, self._on_fallback).run(*operands)
        mutating = [a for a in args if isinstance(a, torch._ops.OpOverload)]
        what = (
            f"{mutating[0]}, which writes to its arguments," if mutating else f"the higher-order operator {node.target}"
        )
        raise XLACompilationError(
            f"{what} has no lowering to XLA here{user_line(node)}. Allowed: ATen operators, and custom operators that "
            "return new tensors. Try: rewrite the region without it, or wrap it in torch.compiler.disable."
        )


class ShardedInterpreter(XlaInterpreter):
    """`XlaInterpreter` for a program that runs on several devices."""

    is_sharded = True


def _as_indices(result: Any) -> Any:
    """Separate the integer results of a multi-result operator from its tuple, by adding 0.

    torch_xla 2.9 aborts the process if such a result becomes an index (`index_select`, `embedding`), because it asks
    the tuple of all results for the number of dimensions.
    """
    if not isinstance(result, (tuple, list)):
        return result
    return tuple(r + 0 if isinstance(r, torch.Tensor) and r.dim() < 2 and is_integer(r.dtype) else r for r in result)


@functools.cache
def _creates_on_default_device(target: Any) -> bool:
    """Whether an op makes a tensor of numbers alone: a decomposition may leave out the device."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    arguments = target._schema.arguments
    has_tensor = any("Tensor" in str(argument.type) for argument in arguments)
    return not has_tensor and any(argument.name == "device" for argument in arguments)


def _is_opaque(target: Any) -> bool:
    """Whether this is a custom operator without an XLA kernel: its Python body must run at every call."""
    return is_user_defined(target) and not torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "XLA")


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Trace below autograd and autocast, which the graph already contains."""
    with (
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._DisableAutocast(),
        values_forbidden(),
    ):
        yield
