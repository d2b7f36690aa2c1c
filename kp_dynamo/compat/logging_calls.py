"""Log calls inside a forward that do not break its graph: they run after the graph, at every call.

torch 2.9 breaks the graph at print, warnings.warn and methods of loggers. It has two settings against it. One drops the
messages of loggers; the other drops keyword arguments, and all calls in functions that Dynamo inlines. Both change all
backends of the process; these patches only change what is traced for kp_tpu.

A call stays where it is, and breaks the graph as with other backends, if moving it could be seen: in try and with
blocks, after a change of a Python object, for handlers and filters that are not Python's own, for warnings that may
be errors, and for arguments that are no plain values. What is moved reports the line of the compiled function.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.variables import BuiltinVariable, ConstantVariable, SkipFunctionVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.misc import LoggingLoggerVariable, StringFormatVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._dynamo.variables.torch_function import TorchFunctionModeStackVariable

from kp_dynamo.compat.dynamo_trace import backend_of_trace, changes_objects

_LEVELS = ("debug", "info", "warning", "error", "critical")
_IDS = {id(function) for function in (print, warnings.warn, *(getattr(logging, name) for name in _LEVELS))}
_BLOCKS = str(Path(__file__).parents[1] / "blocks")
_STANDARD = ("logging", "logging.handlers")
_FIXED = (str, bytes, bool, int, float, complex, torch.dtype, torch.device)
# transformers adds the last three to logging.Logger.
_METHODS = (*_LEVELS, "warn", "log", "warning_once", "warning_advice", "info_once")


@functools.cache
def install() -> None:
    """Patch Dynamo's calls of functions and of loggers' methods, before a trace for the backend or for `aot`."""
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
    """Whether the call was moved behind the graph: nothing can tell the difference, and the backend is ours."""
    if not getattr(backend_of_trace(), "moves_log_calls", False):
        return False
    # transformers enters and leaves a torch function mode while it makes a mask.
    if _is_guarded(tx) or changes_objects(but=(TorchFunctionModeStackVariable,)) or not _only_logs(function):
        return False
    held: list[Any] = []
    if all(map(_is_constant, args)):
        held, args = [value.as_python_constant() for value in args], []
    elif not all(map(_is_plain, args)):
        return False
    named = {name: value.as_python_constant() for name, value in kwargs.items() if _is_constant(value)}
    if len(named) < len(kwargs):
        return False
    # The translator of the whole frame: torch forgets the calls of translators of inlined functions.
    tx.output.root_tx.debug_locals.append((_Later(functools.partial(function, *held, **named)), list(args)))
    return True


def _is_guarded(tx: Any) -> bool:
    """Whether the call is in a try or with block, or in a child of `compile_blocks` that Dynamo follows.

    There a warning that is turned into an error, or hidden or recorded, decides what happens next; and the child's own
    program logs, too.
    """
    while tx is not None:
        if tx.block_stack or tx.current_instruction.exn_tab_entry or _BLOCKS in tx.f_code.co_filename:
            return True
        tx = getattr(tx, "parent", None)
    return False


def _only_logs(function: Any) -> bool:
    """Whether a call cannot raise by itself, or run code of the user."""
    if function is warnings.warn:
        return not _may_raise()
    if function is print:
        return True
    logger = getattr(function, "__self__", logging.root)
    while logger is not None:
        if logger.filters or any(h.filters or type(h).__module__ not in _STANDARD for h in logger.handlers):
            return False
        logger = logger.parent if logger.propagate else None
    return True


def _may_raise() -> bool:
    """Whether a warning may be turned into an error: a filter says so before one for all warnings says otherwise."""
    for action, message, category, module, line in warnings.filters:
        if action == "error":
            return True
        if message is None and module is None and category is Warning and line == 0:
            return False
    return False


def _is_constant(value: Any) -> bool:
    """Whether a value is a constant whose text Dynamo keeps: it forgets the order and the kind of containers."""
    return bool(value.is_python_constant()) and _is_fixed(value.as_python_constant())


def _is_fixed(value: Any) -> bool:
    if type(value) in (tuple, torch.Size):
        return all(map(_is_fixed, value))
    return value is None or type(value) in _FIXED or (isinstance(value, type) and issubclass(value, Warning))


def _is_plain(value: Any) -> bool:
    """Whether a value cannot change until the graph has run: a constant, a size, a tuple or a text of them."""
    if isinstance(value, TupleVariable):  # a shape is one
        return value.python_type() in (tuple, torch.Size) and all(map(_is_plain, value.items))
    if isinstance(value, StringFormatVariable):
        return all(map(_is_plain, (*value.sym_args, *value.sym_kwargs.values())))
    return isinstance(value, SymNodeVariable) or _is_constant(value)


class _Later(VariableTracker):
    """A function that the compiled frame calls after the graph."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(**options)
        self.function = function

    def reconstruct(self, codegen: Any) -> None:
        name = codegen.tx.output.install_global_by_id("kp_log", self.function)
        codegen.append_output(codegen.create_load_global(name, add=True))
