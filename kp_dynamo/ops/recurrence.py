"""`kp::recurrence`: the time steps of one layer and direction of an LSTM, a GRU or an RNN, and its backward.

    recurrence(cell, gates, states, weights, reverse, train, mask) -> [results, *final states, *saved values]

    gates [T, B, G * H], states [B, P] or [B, H], results [T, B, P], final states as states, saved values [T, B, ...],
    mask bool[T] or None

`recurrent_cells.py` has the cells and the letters. Gates and states have one dtype, which the results get. float16 and
bfloat16 are computed in float32, and the state between two steps is not rounded. `train` also returns what the backward
reads.

A step at which the mask is false leaves the states as they are. Its result is the state, whose gradient is ignored. The
steps that pad a sequence to a bucket are such.

The operators loop over the steps in Python; `lowering/loop_forms.py` lowers them to one loop of the program, whose body
is compiled once. The gradients of the weights are matmuls over all steps, outside the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kp_dynamo.ops.compute_dtype import compute_dtype
from kp_dynamo.ops.recurrent_cells import CELLS, Step, Tensors, bias, projection

Scan = Callable[[Step, Tensors, Tensors, Tensors, bool], tuple[Tensors, Tensors]]
"""(step, carry, xs, constants, reverse) -> (carry, ys), where `step(carry, [x[t] for x in xs], constants)` returns the
next carry and y[t]."""

_library = torch.library.Library("kp", "FRAGMENT")
_library.define(
    "recurrence(str cell, Tensor gates, Tensor[] states, Tensor[] weights, bool reverse, bool train, "
    "Tensor? mask) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "recurrence_backward(str cell, Tensor[] gradients, Tensor[] steps, Tensor[] weights, bool reverse, "
    "Tensor? mask) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)


def scan_in_python(
    step: Step, carry: Tensors, xs: Tensors, constants: Tensors, reverse: bool
) -> tuple[Tensors, Tensors]:
    """A `Scan` that calls `step` for each time step."""
    times, rows = range(xs[0].shape[0]), []
    for t in reversed(times) if reverse else times:
        carry, row = step(carry, [x[t] for x in xs], constants)
        rows.append(row)
    return list(carry), [torch.stack(ys) for ys in zip(*(reversed(rows) if reverse else rows), strict=True)]


def forward(
    scan: Scan,
    cell: str,
    gates: Tensor,
    states: Tensors,
    weights: Tensors,
    reverse: bool,
    train: bool,
    mask: Tensor | None,
) -> Tensors:
    """`kp::recurrence` with the loop of `scan`."""
    wide = compute_dtype(gates.dtype)

    def step(carry: Tensors, xs: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
        new, saved = CELLS[cell].forward(xs[0].to(wide), carry, constants)
        new = _where(xs[1:], new, carry)
        return new, _in([new[0], *((*saved, *new[1:]) if train else ())], gates.dtype)

    final, (results, *saved) = scan(step, _in(states, wide), [gates, *_by_row(mask)], weights, reverse)
    return [results, *_in(final, gates.dtype), *saved]


def backward(
    scan: Scan,
    cell: str,
    gradients: Tensors,
    steps: Tensors,
    weights: Tensors,
    reverse: bool,
    mask: Tensor | None,
) -> Tensors:
    """`kp::recurrence_backward` with the loop of `scan`: [gradient of gates, ..., gradients of the states].

    `gradients` are those of the results and of the final states.
    """
    of_results, *of_final = gradients
    wide, narrow, num_values = compute_dtype(of_results.dtype), of_results.dtype, 1 + len(steps)

    def step(carry: Tensors, xs: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
        d_result, *saved = _in(xs[:num_values], wide)
        new, made = CELLS[cell].backward([carry[0] + d_result, *carry[1:]], saved, constants)
        masks = xs[num_values:]
        return _where(masks, new, carry), _in(_where(masks, made, [torch.zeros_like(m) for m in made]), narrow)

    of_states, made = scan(step, _in(of_final, wide), [of_results, *steps, *_by_row(mask)], weights, not reverse)
    return [*made, *_in(of_states, narrow)]


def _by_row(mask: Tensor | None) -> Tensors:
    """The mask [T] as [T, 1, 1], one more value of each step; none without a mask."""
    return [] if mask is None else [mask.view(-1, 1, 1)]


def _where(masks: Tensors, values: Sequence[Tensor], others: Sequence[Tensor]) -> Tensors:
    """`values` where the mask of a step is true, else `others`; `values` without a mask."""
    if not masks:
        return list(values)
    return [torch.where(masks[0], value, other) for value, other in zip(values, others, strict=True)]


def _in(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensors:
    return [t.to(dtype) for t in tensors]


def _forward_fake(
    cell: str, gates: Tensor, states: Tensors, weights: Tensors, reverse: bool, train: bool, mask: Tensor | None
) -> Tensors:
    rows, hidden = gates.shape[:2], weights[0].shape[0] // CELLS[cell].num_gates
    saved = [gates.new_empty((*rows, width * hidden)) for width in (CELLS[cell].saved if train else ())]
    results = gates.new_empty((*rows, states[0].shape[-1]))
    return [results, *(torch.empty_like(s, memory_format=torch.contiguous_format) for s in states), *saved]


def _backward_fake(
    cell: str, gradients: Tensors, steps: Tensors, weights: Tensors, reverse: bool, mask: Tensor | None
) -> Tensors:
    of_results, *of_final = gradients
    made = [of_results.new_empty((*of_results.shape[:2], weights[0].shape[0]))]
    if cell == "gru":
        made.append(torch.empty_like(made[0]))
    if cell == "lstm" and projection(weights) is not None:
        made.append(torch.empty_like(of_results, memory_format=torch.contiguous_format))
    return [*made, *(torch.empty_like(g, memory_format=torch.contiguous_format) for g in of_final)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    ctx.cell, _, states, weights, ctx.reverse, ctx.train, mask = inputs
    ctx.num_states, ctx.num_weights = len(states), len(weights)
    ctx.save_for_backward(mask, *states, *weights, output[0], *output[1 + len(states) :])


def _gradients(ctx: Any, gradients: Sequence[Tensor]) -> tuple[Any, ...]:
    if not ctx.train:
        raise RuntimeError("kp::recurrence with train=False has no backward: it saves nothing for it")
    cell, n = CELLS[ctx.cell], ctx.num_states
    mask, *saved = ctx.saved_tensors
    states, weights, (results, *values) = saved[:n], saved[n : n + ctx.num_weights], saved[n + ctx.num_weights :]
    h_before = _before(results, states[0], ctx.reverse)
    before = [h_before, *([_before(values[1], states[1], ctx.reverse)] if n > 1 else ())]
    steps = cell.steps(values, results, before)
    made = torch.ops.kp.recurrence_backward(ctx.cell, list(gradients[: 1 + n]), steps, weights, ctx.reverse, mask)
    made, of_states = made[: len(made) - n], made[len(made) - n :]
    hidden = cell.hidden_gradient(made).flatten(0, 1)
    of_weights = [hidden.t() @ h_before.flatten(0, 1)]
    if bias(weights) is not None:
        of_weights.append(hidden.sum(0))
    if projection(weights) is not None:
        gates, c = values
        h = gates.chunk(4, -1)[3] * torch.tanh(c)
        of_weights.append(made[1].flatten(0, 1).t() @ h.flatten(0, 1))
    of_weights = [of.to(w.dtype) for of, w in zip(of_weights, weights, strict=True)]
    return None, made[0], of_states, of_weights, None, None, None


def _before(states: Tensor, initial: Tensor, reverse: bool) -> Tensor:
    """The state before each step, of the states [T, ...] after it."""
    # Not states[:-1]: its size may be 1, on which Dynamo would specialize.
    steps = states.shape[0]
    if reverse:
        return torch.cat((states, initial[None])).narrow(0, 1, steps)
    return torch.cat((initial[None], states)).narrow(0, 0, steps)


def _with_python_loop(run: Callable[..., Tensors]) -> Callable[..., Tensors]:
    return lambda *args: run(scan_in_python, *args)


# Not at the Functionalize key: AOTAutograd would decompose them there. Below it, torch_xla 2.9 lowers views to gathers
# of elements, so the lowering has forms.
for _device in ("CPU", "XLA"):
    _library.impl("recurrence", _with_python_loop(forward), _device)
    _library.impl("recurrence_backward", _with_python_loop(backward), _device)
torch.library.register_fake("kp::recurrence", _forward_fake, lib=_library)
torch.library.register_fake("kp::recurrence_backward", _backward_fake, lib=_library)
torch.library.register_autograd("kp::recurrence", _gradients, setup_context=_save, lib=_library)


@register_flop_formula(torch.ops.kp.recurrence)
def _flops(_: str, gates: torch.Size, states: Any, weights: Any, *__: Any, **___: Any) -> int:
    """For `torch.utils.flop_counter`: the matmuls with the weights."""
    return 2 * int(gates[0] * gates[1] * sum(w[0] * w[1] for w in weights if len(w) == 2))


@register_flop_formula(torch.ops.kp.recurrence_backward)
def _backward_flops(_: str, gradients: Any, steps: Any, weights: Any, *__: Any, **___: Any) -> int:
    """The gradients of the states. Those of the weights are matmuls outside."""
    return 2 * int(gradients[0][0] * gradients[0][1] * sum(w[0] * w[1] for w in weights if len(w) == 2))
