"""Log calls inside a forward that do not break its graph: they run after the graph, at every call.

torch 2.9 breaks the graph at print, warnings.warn and methods of loggers. It has two settings against it. One drops the
messages of loggers; the other drops keyword arguments, and all calls in functions that Dynamo inlines. Both change all
backends of the process; these patches only change what is traced for kp_tpu.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

from torch._dynamo.variables import BuiltinVariable, ConstantVariable, SkipFunctionVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.misc import LoggingLoggerVariable, StringFormatVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from kp_dynamo.compat.dynamo_trace import backend_of_trace

_LEVELS = ("debug", "info", "warning", "error", "critical")
_IDS = {id(function) for function in (print, warnings.warn, *(getattr(logging, name) for name in _LEVELS))}
# transformers adds the last three to logging.Logger.
_METHODS = (*_LEVELS, "warn", "log", "warning_once", "warning_advice", "info_once")


@functools.cache
def install() -> None:
    """Patch Dynamo's calls of functions and of loggers' methods. `import kp_dynamo.backend` calls this once."""
    _patch(BuiltinVariable, "call_function", lambda variable: variable.fn)
    _patch(SkipFunctionVariable, "call_function", lambda variable: variable.value)
    _patch(UserFunctionVariable, "call_function", lambda variable: variable.fn)
    _patch(LoggingLoggerVariable, "call_method", _method)


def _patch(kind: Any, name: str, function_of: Callable[..., Any]) -> None:
    original = getattr(kind, name)

    @functools.wraps(original)
    def patched(self: Any, tx: Any, *rest: Any) -> Any:
        *method, args, kwargs = rest
        function = function_of(self, *method)
        if _is_log_call(function) and _runs_later(tx, function, args, kwargs):
            return ConstantVariable.create(None)
        return original(self, tx, *rest)

    setattr(kind, name, patched)


def _method(variable: Any, name: str) -> Any:
    """The bound method of a logger, if it is that of every logger: a subclass may do more than log."""
    own, shared = getattr(type(variable.value), name, None), getattr(logging.Logger, name, None)
    return getattr(variable.value, name) if name in _METHODS and own is shared else None


def _is_log_call(function: Any) -> bool:
    return isinstance(getattr(function, "__self__", None), logging.Logger) or id(function) in _IDS


def _runs_later(tx: Any, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the call was moved behind the graph: its arguments are plain values, and the backend is ours."""
    if not all(value.is_python_constant() for value in kwargs.values()) or "exc_info" in kwargs:
        return False
    if not getattr(backend_of_trace(), "moves_log_calls", False):
        return False
    held: list[Any] = []
    if all(value.is_python_constant() for value in args):
        # Read now: the frame may change a list before it calls the function.
        held, args = [value.as_python_constant() for value in args], []
    elif not all(map(_is_plain, args)):
        return False
    named = {name: value.as_python_constant() for name, value in kwargs.items()}
    # The translator of the whole frame: torch forgets the calls of translators of inlined functions.
    tx.output.root_tx.debug_locals.append((_Later(functools.partial(function, *held, **named)), list(args)))
    return True


def _is_plain(value: Any) -> bool:
    """Whether a value cannot change until the graph has run: a constant, a size, a tuple or a text of them."""
    if isinstance(value, TupleVariable):  # a shape is one
        return all(map(_is_plain, value.items))
    if isinstance(value, StringFormatVariable):
        return all(map(_is_plain, (*value.sym_args, *value.sym_kwargs.values())))
    return isinstance(value, (ConstantVariable, SymNodeVariable))


class _Later(VariableTracker):
    """A function that the compiled frame calls after the graph."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(**options)
        self.function = function

    def reconstruct(self, codegen: Any) -> None:
        name = codegen.tx.output.install_global_by_id("kp_log", self.function)
        codegen.append_output(codegen.create_load_global(name, add=True))
