"""`kp::lstm` and `kp::rnn`: the layers and directions of a recurrent stack, with the arguments of `aten::lstm.input`.

    lstm(input, [h, c], params, ...) -> (result, h, c)
    rnn(cell, input, h, params, ...) -> (result, h)           cell: "gru", "rnn_tanh" or "rnn_relu"

They replace torch 2.9's decompositions, which unroll the time steps and never apply the dropout between the layers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kp_dynamo.ops.recurrence  # noqa: F401  # registers the operator

_library = torch.library.Library("kp", "FRAGMENT")
_SETTINGS = (
    "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, bool batch_first"
)
_library.define(
    f"lstm(Tensor input, Tensor[] hx, {_SETTINGS}) -> (Tensor, Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag
)
_library.define(
    f"rnn(str cell, Tensor input, Tensor hx, {_SETTINGS}) -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag
)


def _lstm(input: Tensor, hx: list[Tensor], *settings: Any) -> tuple[Tensor, ...]:
    return _stack("lstm", input, hx, *settings)


def _rnn(cell: str, input: Tensor, hx: Tensor, *settings: Any) -> tuple[Tensor, ...]:
    return _stack(cell, input, [hx], *settings)


def _stack(
    cell: str,
    input: Tensor,
    states: list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    x = input.transpose(0, 1) if batch_first else input
    torch._check(x.shape[0] > 0, lambda: "Expected sequence length to be larger than 0 in RNN")
    num_directions = 2 if bidirectional else 1
    size = len(params) // (num_layers * num_directions)
    finals = []
    for layer in range(num_layers):
        results = []
        for place in range(layer * num_directions, (layer + 1) * num_directions):
            own = params[place * size : (place + 1) * size]
            reverse = bidirectional and place % 2 == 1
            result, *final = _direction(cell, x, [s[place] for s in states], own, has_biases, reverse)
            results.append(result)
            finals.append(final)
        x = torch.cat(results, -1) if bidirectional else results[0]
        if train and dropout and layer < num_layers - 1:
            x = F.dropout(x, dropout)
    return (x.transpose(0, 1) if batch_first else x, *(torch.stack(s) for s in zip(*finals, strict=True)))


def _direction(
    cell: str, x: Tensor, states: list[Tensor], params: list[Tensor], has_biases: bool, reverse: bool
) -> list[Tensor]:
    """One layer in one direction: [results [T, B, P], *final states]."""
    w_ih, w_hh, *rest = params
    biases, projection = (rest[:2], rest[2:]) if has_biases else ([], rest)
    gates = F.linear(x, w_ih, biases[0] if biases else None)
    weights = [w_hh, *biases[1:], *projection]
    given = (x, *states, *params)
    torch._check(
        len({t.dtype for t in given}) == 1 or torch.is_autocast_enabled(x.device.type),
        lambda: f"input, states and weights of {cell} must have one dtype, not {[str(t.dtype) for t in given]}",
    )
    # Under autocast the matmul above is narrow, and the states are not.
    narrow, wide = gates.dtype, functools.reduce(torch.promote_types, (t.dtype for t in (gates, *states)))
    gates, *states = (t.to(wide) for t in (gates, *states))
    weights = [w.to(narrow) for w in weights]
    train = torch.is_grad_enabled() and any(t.requires_grad for t in (gates, *states, *weights))
    made: list[Tensor] = torch.ops.kp.recurrence(cell, gates, states, weights, reverse, train, None)
    dtypes = _autocast_dtypes(cell, narrow, wide, is_projected=bool(projection))
    return [t.to(dtype) for t, dtype in zip(made, dtypes, strict=False)]


def _autocast_dtypes(cell: str, narrow: torch.dtype, wide: torch.dtype, *, is_projected: bool) -> list[torch.dtype]:
    """The dtypes that eager gives to (results, *final states): it rounds what its kernels compute in narrow dtypes."""
    if cell == "lstm":
        return [narrow, narrow, wide if is_projected else narrow]
    return [wide, wide] if cell == "gru" else [narrow, narrow]


_library.impl("lstm", _lstm, "CompositeImplicitAutograd")
_library.impl("rnn", _rnn, "CompositeImplicitAutograd")
