"""Let Dynamo trace `nn.LSTM`, `nn.GRU` and `nn.RNN` for kp_tpu, as calls of `kp::lstm` and `kp::rnn`.

torch 2.9 gives up every frame that reads such a module, unless `torch._dynamo.config.allow_rnn` is set. Then Dynamo and
AOTAutograd unroll the time steps: a graph is made for each length, in a time that grows with it, and the dropout
between the layers is lost. The setting would change all backends of the process; these patches only change what is
traced for kp_tpu.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._dynamo import config
from torch._dynamo.variables import ConstantVariable, TorchInGraphFunctionVariable, UserFunctionVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch.nn.modules import rnn
from torch.nn.utils.rnn import PackedSequence

import kp_dynamo.ops  # noqa: F401  # registers the operators
from kp_dynamo.compat.dynamo_trace import backend_of_frame
from kp_dynamo.compat.given_up_frames import give_up
from kp_dynamo.compat.versions import earlier_version

_CELLS: dict[Any, str] = {
    torch.lstm: "lstm",
    torch.gru: "gru",
    torch.rnn_tanh: "rnn_tanh",
    torch.rnn_relu: "rnn_relu",
}

_FORWARDS = {rnn.LSTM.forward, rnn.GRU.forward, rnn.RNN.forward}
_PACKED = "its input is a packed sequence (PackedSequence): its steps have batches of different sizes"


@functools.cache
def install() -> None:
    """Patch how Dynamo reads a module and calls a function, before a trace for the backend or for `aot`."""
    if earlier_version() is not None:
        return
    wrap_module, call_function = VariableBuilder.wrap_module, TorchInGraphFunctionVariable.call_function

    @functools.wraps(wrap_module)
    def wrapped(self: Any, value: torch.nn.Module) -> Any:
        if not isinstance(value, torch.nn.RNNBase) or not _is_for_us():
            return wrap_module(self, value)
        with config.patch(allow_rnn=True):
            return wrap_module(self, value)

    @functools.wraps(call_function)
    def called(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        cell = _CELLS.get(self.value) if isinstance(self.value, type(torch.lstm)) else None
        if cell is None or kwargs or _has_batch_sizes(args) or not _is_for_us():
            return call_function(self, tx, args, kwargs)
        target = torch.ops.kp.lstm.default if cell == "lstm" else torch.ops.kp.rnn.default
        given = args if cell == "lstm" else [ConstantVariable.create(cell), *args]
        return call_function(TorchInGraphFunctionVariable(target), tx, given, kwargs)

    call_python = UserFunctionVariable.call_function

    @functools.wraps(call_python)
    def called_python(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        _give_up_packed_sequence(tx, self.fn, args)
        return call_python(self, tx, args, kwargs)

    VariableBuilder.wrap_module = wrapped  # type: ignore[method-assign]
    TorchInGraphFunctionVariable.call_function = called  # type: ignore[method-assign]
    UserFunctionVariable.call_function = called_python  # type: ignore[method-assign]


def _is_for_us() -> bool:
    return bool(getattr(backend_of_frame(), "traces_recurrent", False))


def _give_up_packed_sequence(tx: Any, called: Any, args: Sequence[Any]) -> None:
    """Give up the frame of a call of a recurrent layer on a packed sequence, as torch does with every recurrent layer.

    At a graph break inside, Dynamo would go on behind the layer, where `pad_packed_sequence` needs the sizes of the
    batches, which fake tensors do not have. With `fullgraph=True` it is that graph break which raises.
    """
    if called in _FORWARDS and not tx.one_graph and any(map(_is_packed_sequence, args)) and _is_for_us():
        give_up(_PACKED)


def _is_packed_sequence(value: Any) -> bool:
    return isinstance(value.realize(), UserDefinedObjectVariable) and value.python_type() is PackedSequence


def _has_batch_sizes(args: Sequence[Any]) -> bool:
    """Whether the sizes of the batches are an argument: then the weights are the fourth, and not the third."""
    return len(args) > 3 and isinstance(args[3], BaseListVariable)
