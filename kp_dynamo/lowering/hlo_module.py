"""A serialized HLO module of one instruction that torch_xla 2.9 has no builder for: XLA's Fft.

The numbers of the fields are those of xla/service/hlo.proto and xla/xla_data.proto, which never change.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

FFT_KINDS = ("FFT", "IFFT", "RFFT", "IRFFT")
"""By their number in xla/xla_data.proto."""

_PRIMITIVE_TYPES = {"f32": 11, "f64": 12, "c64": 15, "c128": 18}
_ENTRY, _OPERAND, _RESULT = 1, 2, 3  # ids in the module; XLA aborts the process if a name does not end in one


class Shape(NamedTuple):
    """XLA's name of a dtype, and the sizes."""

    xla_type: str
    sizes: tuple[int, ...]


def fft_module(kind: str, length: int, operand: Shape, result: Shape) -> bytes:
    """The computation `result = fft(operand)` over the last dimension.

    Args:
        kind: One of `FFT_KINDS`.
        length: The number of real or complex samples: for RFFT those of the operand, for IRFFT those of the result.
        operand: The shape of the operand.
        result: The shape of the result.
    """
    parameter = _field(1, f"x.{_OPERAND}") + _field(2, "parameter") + _field(3, _shape(operand)) + _field(35, _OPERAND)
    transform = [
        _field(1, f"transform.{_RESULT}"), _field(2, "fft"), _field(3, _shape(result)),
        _field(31, FFT_KINDS.index(kind)), _packed(32, [length]), _field(35, _RESULT), _packed(36, [_OPERAND]),
    ]  # fmt: skip
    signature = _field(1, _shape(operand)) + _field(2, _shape(result)) + _field(3, "x")
    name = f"fft.{_ENTRY}"
    computation = [
        _field(1, name), _field(2, parameter), _field(2, b"".join(transform)), _field(4, signature),
        _field(5, _ENTRY), _field(6, _RESULT),
    ]  # fmt: skip
    module = [
        _field(1, name), _field(2, name), _field(3, b"".join(computation)), _field(4, signature), _field(6, _ENTRY),
    ]  # fmt: skip
    return b"".join(module)


def _shape(shape: Shape) -> bytes:
    """A ShapeProto: dtype, sizes, which of them vary (none), and the default layout, last dimension innermost."""
    rank = len(shape.sizes)
    layout = _packed(1, reversed(range(rank)))
    return (
        _field(2, _PRIMITIVE_TYPES[shape.xla_type])
        + _packed(3, shape.sizes)
        + _field(5, layout)
        + _packed(6, [0] * rank)
    )


def _field(number: int, value: int | str | bytes) -> bytes:
    """One field of a protobuf message: an integer, or a string or message with its length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    content = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _packed(number: int, values: Iterable[int]) -> bytes:
    return _field(number, b"".join(map(_varint, values)))


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; all bytes but the last have the high bit."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
