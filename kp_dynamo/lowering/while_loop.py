"""A loop over time steps as one While of the program, whose body is compiled once.

    scan(step, carry, xs, constants, reverse) -> (carry, ys)

The body is traced on placeholders for one step. The While carries (t, carry, xs, ys, constants): it slices xs at t, and
writes one slice of ys. torch_xla 2.9's own `scan` does the same, but it differentiates its body itself, and it puts
the counter into a buffer, so that the number of steps would be an input of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kp_dynamo.compat import xla

Tensors = list[Tensor]
Step = Callable[[Tensors, Tensors, Tensors], tuple[Tensors, Tensors]]


class _Body(NamedTuple):
    """The computation of one step.

    Attributes:
        computation: Its XLA computation, which returns (carry, ys).
        order: For each of its parameters, the position of the operand among (carry, x, constants, `held`).
        held: Other tensors that it reads.
        results: Placeholders of (carry, ys).
    """

    computation: Any
    order: list[int]
    held: Tensors
    results: Tensors


def scan(step: Step, carry: Tensors, xs: Tensors, constants: Tensors, reverse: bool) -> tuple[Tensors, Tensors]:
    """Run `step(carry, [x[t] for x in xs], constants)` for each t; returns the last carry, and its ys of all steps."""
    from torch_xla.core import xla_builder as xb

    body, num_steps = _body(step, carry, xs, constants), xs[0].shape[0]
    made = body.results[len(carry) :]
    ys = [torch.zeros((num_steps, *y.shape), dtype=y.dtype, device=y.device) for y in made]
    counter = torch.zeros((), dtype=torch.int32, device=xs[0].device)
    operands = [counter, *carry, *xs, *ys, *constants, *body.held]
    builder = xb.create_builder("scan")
    parameters = [xb.mkparam(builder, i, xb.tensor_shape(t)) for i, t in enumerate(operands)]
    sizes = (1, len(carry), len(xs), len(ys), len(constants) + len(body.held))

    def condition(t: Any, *_: Any) -> Any:
        return t < _number(t, num_steps)

    def advance(*values: Any) -> tuple[Any, ...]:
        (t,), carry, xs, ys, constants = _split(values, sizes)
        place = _number(t, num_steps - 1) - t if reverse else t
        given = [*carry, *(_at(x, place) for x in xs), *constants]
        result = xb.Op.call(body.computation, [given[i] for i in body.order])
        rows = [result.get_tuple_element(len(carry) + i) for i in range(len(ys))]
        written = [_with_row(y, row, place) for y, row in zip(ys, rows, strict=True)]
        return (t + _number(t, 1), *(result.get_tuple_element(i) for i in range(len(carry))), *xs, *written, *constants)

    loop = xb.Op.mkwhile(parameters, condition, advance).build("scan")
    results = xla.xlac()._xla_user_computation("kp::scan", operands, loop)
    _, carry, _, ys, _ = _split(results, sizes)
    return list(carry), list(ys)


def _body(step: Step, carry: Tensors, xs: Tensors, constants: Tensors) -> _Body:
    """Trace one step on placeholders; the caller holds the lock of the trace."""
    from torch_xla.core import xla_builder as xb

    operands = [_placeholder(t.shape, t) for t in carry], [_placeholder(x.shape[1:], x) for x in xs]
    given = [*operands[0], *operands[1], *(_placeholder(t.shape, t) for t in constants)]
    new, ys = step(*operands, given[len(carry) + len(xs) :])
    context = xla.xlac().lowering.LoweringContext("step")
    context.set_name_string("step")
    context.build([*new, *ys])
    computation = xb.computation_from_module_proto("step", context.hlo())
    numbers = [context.tensor_parameter_id(t) for t in given]
    held = {n: t for n, t in context.device_parameter_id_tensor_mapping().items() if n not in numbers}
    places = {n: i for i, n in enumerate(numbers) if n != -1}
    places |= {n: len(given) + i for i, n in enumerate(held)}
    return _Body(computation, [places[n] for n in range(len(places))], list(held.values()), [*new, *ys])


def _placeholder(shape: Sequence[int], like: Tensor) -> Tensor:
    from torch_xla.core.xla_builder import create_placeholder_tensor

    return create_placeholder_tensor(tuple(shape), like.dtype)  # type: ignore[no-any-return]


def _number(beside: Any, value: int) -> Any:
    from torch_xla.core import xla_builder as xb

    return xb.Op.scalar(beside.builder(), value, dtype=xb.Type.S32)


def _at(x: Any, place: Any) -> Any:
    """x[place]."""
    _, *sizes = x.shape().sizes
    return x.dynamic_slice(_start(x, place), [1, *sizes]).reshape(sizes)


def _with_row(y: Any, row: Any, place: Any) -> Any:
    """y with y[place] = row."""
    _, *sizes = y.shape().sizes
    return y.dynamic_update_slice(row.reshape([1, *sizes]), _start(y, place))


def _start(x: Any, place: Any) -> list[Any]:
    return [place, *(place.zeros_like() for _ in range(x.shape().rank - 1))]


def _split(values: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(list(values[start : start + size]))
        start += size
    return pieces
