"""One time step of an LSTM, a GRU and an RNN, and its gradient.

B batch, H hidden size, P size of the result (H, or `proj_size` of an LSTM), G number of gates.

    forward   gates [B, G * H], states, weights               -> new states, other values saved for the backward
    backward  gradients of the new states, saved, weights     -> gradients of the states, gradients of the gates, ...

All values are float32 or float64, but weights may be narrower: states are rounded to their dtype for the matmul.

`gates` is the input's share: `linear(input, w_ih, b_ih)`, which is one matmul for all steps. The first state is the
result of the step, [B, P]. The weights are `w_hh` [G * H, P], `b_hh` [G * H] if there are biases, and `w_hr` [P, H] if
an LSTM projects its result.

Hochreiter and Schmidhuber 1997 (LSTM), Cho et al. 2014, arXiv:1406.1078 (GRU), in the form that `torch.nn` computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kp_dynamo.ops.compute_dtype import compute_dtype
from kp_dynamo.ops.saturating import tanh

Tensors = list[Tensor]
Step = Callable[..., tuple[Tensors, Tensors]]


@dataclass(frozen=True)
class Cell:
    """A recurrent cell.

    Attributes:
        num_gates: Number of gates, G.
        forward: (gates, states, weights) -> (new states, other saved values).
        backward: (gradients of the new states, steps, weights) -> (gradients of the states, [gradient of `gates`, and
            what `hidden_gradient` or the gradient of a projection reads]).
        saved: The widths of the saved values, in multiples of H; new states but the result are among them.
        steps: (saved values of all steps, results of all steps, states before each step) -> the steps of `backward`.
        hidden_gradient: What `backward` returned beside the states -> gradient of `linear(h, w_hh, b_hh)`.
    """

    num_gates: int
    forward: Step
    backward: Step
    saved: tuple[int, ...]
    steps: Callable[[Tensors, Tensor, Tensors], Tensors]
    hidden_gradient: Callable[[Tensors], Tensor]


def _matmul(x: Tensor, weight: Tensor) -> Tensor:
    # The TPU's compiler folds the upcasts back into the matmul.
    wide = compute_dtype(weight.dtype)
    return x.to(weight.dtype).to(wide) @ weight.to(wide)


def _hidden(h: Tensor, weights: Tensors) -> Tensor:
    """The state's share of the gates."""
    hidden, b_hh = _matmul(h, weights[0].t()), bias(weights)
    return hidden if b_hh is None else hidden + b_hh


def bias(weights: Tensors) -> Tensor | None:
    """`b_hh`, if the layer has biases."""
    return weights[1] if len(weights) > 1 and weights[1].dim() == 1 else None


def projection(weights: Tensors) -> Tensor | None:
    """`w_hr`, if the result of an LSTM is projected."""
    return weights[-1] if len(weights) > 1 and weights[-1].dim() == 2 else None


def _lstm(gates: Tensor, states: Tensors, weights: Tensors) -> tuple[Tensors, Tensors]:
    (h, c), w_hr = states, projection(weights)
    i, f, g, o = (gates + _hidden(h, weights)).chunk(4, -1)
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), tanh(g), torch.sigmoid(o)
    c = f * c + i * g
    h = o * tanh(c)
    return [h if w_hr is None else _matmul(h, w_hr.t()), c], [torch.cat([i, f, g, o], -1)]


def _lstm_backward(gradients: Tensors, steps: Tensors, weights: Tensors) -> tuple[Tensors, Tensors]:
    (d_result, d_c), (gates, c, c_before), w_hr = gradients, steps, projection(weights)
    d_h = d_result if w_hr is None else _matmul(d_result, w_hr)
    i, f, g, o = gates.chunk(4, -1)
    of_c = tanh(c)
    d_c = d_c + d_h * o * (1 - of_c * of_c)
    d_gates = torch.cat(
        [d_c * g * i * (1 - i), d_c * c_before * f * (1 - f), d_c * i * (1 - g * g), d_h * of_c * o * (1 - o)], -1
    )
    return [_matmul(d_gates, weights[0]), d_c * f], [d_gates, *([] if w_hr is None else [d_result])]


def _gru(gates: Tensor, states: Tensors, weights: Tensors) -> tuple[Tensors, Tensors]:
    h = states[0]
    (r, z, n), (h_r, h_z, h_n) = gates.chunk(3, -1), _hidden(h, weights).chunk(3, -1)
    r, z = torch.sigmoid(r + h_r), torch.sigmoid(z + h_z)
    n = tanh(n + r * h_n)
    return [(h - n) * z + n], [torch.cat([r, z, n, h_n], -1)]


def _gru_backward(gradients: Tensors, steps: Tensors, weights: Tensors) -> tuple[Tensors, Tensors]:
    (d_h,), (saved, before) = gradients, steps
    r, z, n, h_n = saved.chunk(4, -1)
    d_n = d_h * (1 - z) * (1 - n * n)
    d_z = d_h * (before - n) * z * (1 - z)
    d_r = d_n * h_n * r * (1 - r)
    d_hidden = torch.cat([d_r, d_z, d_n * r], -1)
    return [d_h * z + _matmul(d_hidden, weights[0])], [torch.cat([d_r, d_z, d_n], -1), d_hidden]


def _rnn(activation: Callable[[Tensor], Tensor]) -> Step:
    def forward(gates: Tensor, states: Tensors, weights: Tensors) -> tuple[Tensors, Tensors]:
        return [activation(gates + _hidden(states[0], weights))], []

    return forward


def _rnn_backward(slope: Callable[[Tensor, Tensor], Tensor]) -> Step:
    def backward(gradients: Tensors, steps: Tensors, weights: Tensors) -> tuple[Tensors, Tensors]:
        d_gates = slope(gradients[0], steps[0])
        return [_matmul(d_gates, weights[0])], [d_gates]

    return backward


def _tanh_slope(gradient: Tensor, result: Tensor) -> Tensor:
    return gradient * (1 - result * result)


def _relu_slope(gradient: Tensor, result: Tensor) -> Tensor:
    return torch.where(result > 0, gradient, torch.zeros_like(gradient))


def _rnn_cell(activation: Callable[[Tensor], Tensor], slope: Callable[[Tensor, Tensor], Tensor]) -> Cell:
    return Cell(1, _rnn(activation), _rnn_backward(slope), (), lambda _, results, __: [results], lambda made: made[0])


CELLS: dict[str, Cell] = {
    "lstm": Cell(4, _lstm, _lstm_backward, (4, 1), lambda saved, _, before: [*saved, before[1]], lambda made: made[0]),
    "gru": Cell(3, _gru, _gru_backward, (4,), lambda saved, _, before: [*saved, before[0]], lambda made: made[1]),
    "rnn_tanh": _rnn_cell(tanh, _tanh_slope),
    "rnn_relu": _rnn_cell(torch.relu, _relu_slope),
}
