"""Programs as modules that another process can compile: taken from a trace, and traced again as one operator.

A program is compiled from its module in the process that made it too. So XLA gets the same program in both processes,
and the second one finds it in the disk cache. XLA inlines the module.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from kp_dynamo.compat import xla
from kp_dynamo.lowering.base import PortableProgram
from kp_dynamo.lowering.donation import Donation
from kp_dynamo.lowering.program_inputs import InputIds, Slot, classify_inputs
from kp_dynamo.lowering.trace import Trace, placeholder

_READ = ("argument", "seed")
_RETURNED = ("root", "root copy", "argument", "copy")
_KERNEL = b"tpu_custom_call"


class NotPortableError(Exception):
    """Another process could not run a program, for the reason in the message."""


def portable_program(traced: Trace, args: Any) -> PortableProgram:
    """The program of a trace.

    Args:
        traced: A trace without fallbacks.
        args: What the graph was traced for.

    Raises:
        NotPortableError: It reads more than arguments and the seed, donates one, or calls a kernel.
    """
    if traced.donation.inputs:
        raise NotPortableError("it donates arguments")
    if any(slot.kind not in _READ for slot in traced.inputs):
        raise NotPortableError("a program reads a constant tensor")
    outputs = tuple(map(_output, traced.outputs))
    if not traced.roots:
        return PortableProgram(b"", (), outputs, traced.num_draws)
    if not traced.inputs:
        raise NotPortableError("a program reads nothing")  # torch_xla 2.9 calls no module without operands
    context = xla.xlac().lowering.LoweringContext("kp_stored")
    context.build(traced.roots)
    module = bytes(context.hlo())
    if _KERNEL in module:
        raise NotPortableError("a program calls a kernel")
    parameters = _parameters(context, traced, args)
    return PortableProgram(zlib.compress(module, 1), parameters, outputs, traced.num_draws)


def _output(slot: Slot) -> tuple[str, int | None]:
    if slot.kind in _RETURNED:
        return slot.kind, int(slot.value)
    if slot.kind == "value" and slot.value is None:
        return "value", None
    raise NotPortableError("a result is a constant")


def _parameters(context: Any, traced: Trace, args: Any) -> tuple[tuple[int | None, str, tuple[int, ...]], ...]:
    """What the parameters of the module in `context` are, in their order."""
    placeholders, read = traced.keep_alive[0], [s.value for s in traced.inputs if s.kind == "argument"]
    number = {context.tensor_parameter_id(placeholders[position]): position for position in read}
    count = len(context.device_parameter_id_tensor_mapping())
    left = set(range(count)) - number.keys()
    # What is no argument must be the seed.
    if count != len(traced.inputs) or len(number) != len(read) or len(left) != count - len(read) or len(left) > 1:
        raise NotPortableError("the parameters of a program are unknown")
    positions = [number.get(i) for i in range(count)]
    return tuple(
        (None, "int64", ()) if p is None else (p, _name(args[p].dtype), tuple(map(int, args[p].shape)))
        for p in positions
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def portable_trace(program: PortableProgram) -> Trace:
    """The trace of a graph that calls the module of a program, and nothing else.

    Raises:
        NotPortableError: The module returns something else than what is needed.
    """
    outputs = [Slot(kind, value) for kind, value in program.outputs]  # type: ignore[arg-type]  # checked by `_output`
    returned = {value for kind, value in program.outputs if kind.startswith("root")}
    if not program.module and not returned:
        return Trace([], [], outputs, [], Donation(), [], program.num_draws)
    xlac = xla.xlac()
    given = [placeholder(sizes, getattr(torch, dtype)) for _, dtype, sizes in program.parameters]
    known = InputIds(given, {})
    computation = xlac._xla_op_computation_from_module_proto("kp_stored", zlib.decompress(program.module))
    roots = list(xlac._xla_user_computation("kp_tpu::stored", given, computation))
    if returned != set(range(len(roots))):
        raise NotPortableError("a module has other results")
    inputs = [_slot(slot, program) for slot in classify_inputs(roots, known)]
    return Trace(roots, inputs, outputs, [], Donation(), [given], program.num_draws)


def _slot(slot: Slot, program: PortableProgram) -> Slot:
    if slot.kind != "argument":
        raise NotPortableError("a module has unknown inputs")
    position = program.parameters[slot.value][0]
    return Slot("seed") if position is None else Slot("argument", position)
