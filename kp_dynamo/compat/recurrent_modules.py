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
from torch._dynamo.variables import ConstantVariable, TorchInGraphFunctionVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.lists import BaseListVariable

import kp_dynamo.ops  # noqa: F401  # registers the operators
from kp_dynamo.compat.dynamo_trace import backend_of_frame
from kp_dynamo.compat.versions import earlier_version

_CELLS: dict[Any, str] = {
    torch.lstm: "lstm",
    torch.gru: "gru",
    torch.rnn_tanh: "rnn_tanh",
    torch.rnn_relu: "rnn_relu",
}


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
        if cell is None or kwargs or _is_packed(args) or not _is_for_us():
            return call_function(self, tx, args, kwargs)
        target = torch.ops.kp.lstm.default if cell == "lstm" else torch.ops.kp.rnn.default
        given = args if cell == "lstm" else [ConstantVariable.create(cell), *args]
        return call_function(TorchInGraphFunctionVariable(target), tx, given, kwargs)

    VariableBuilder.wrap_module = wrapped  # type: ignore[method-assign]
    TorchInGraphFunctionVariable.call_function = called  # type: ignore[method-assign]


def _is_for_us() -> bool:
    return bool(getattr(backend_of_frame(), "traces_recurrent", False))


def _is_packed(args: Sequence[Any]) -> bool:
    """Whether the sizes of the batches are an argument: then the weights are the fourth, and not the third."""
    return len(args) > 3 and isinstance(args[3], BaseListVariable)
