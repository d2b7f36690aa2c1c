"""Parses the scheduled HLO text of the TPU compiler into instructions.

The text comes from XLA's `HloModule::ToString`: a computation is a header line and indented instructions,

    %fusion.3 = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} fusion(%a, %b), kind=kOutput, calls=%fused.3, metadata={...}, ...
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_START = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = ")
_OPERAND = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b(pred|token|[subfc]\w*?\d+\w*)\[([\d,]*)\](\{[^}]*\})?")
# libtpu 0.0.21 writes broken estimates: a negative number as one of 64 bits without a sign, and 2**63 - 1.
_MOST_CYCLES = (1 << 63) - 1
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_DECLARED = re.compile(r'"cost_estimate":\{[^}]*?"flops":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_INTEGER = re.compile(r"-?\d+")
_OP_NAME = re.compile(r'metadata=\{op_name="([^"]*)"')


@dataclass(frozen=True)
class Shape:
    """Sizes of an array or a tuple of arrays, by memory space; space 1 in a layout is VMEM.

    Attributes:
        hbm_bytes: Bytes in HBM.
        vmem_bytes: Bytes in VMEM.
        dims: Dimensions of the first array.
    """

    hbm_bytes: int = 0
    vmem_bytes: int = 0
    dims: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        return self.hbm_bytes + self.vmem_bytes

    @classmethod
    def read(cls, text: str) -> Shape:
        """Parse HLO text such as "(f32[8,128]{1,0}, bf16[4]{0:T(256)S(1)})"."""
        hbm, vmem, first = 0, 0, None
        for dtype, dims, layout in _ARRAY.findall(text):
            sizes = tuple(int(d) for d in dims.split(",") if d)
            num_bytes = math.prod(sizes) * _element_bytes(dtype)
            first = sizes if first is None else first
            if "S(1)" in layout:
                vmem += num_bytes
            else:
                hbm += num_bytes
        return cls(hbm, vmem, first or ())


def _element_bytes(dtype: str) -> int:
    """Bytes of an element, at least one."""
    bits = re.search(r"\d+", dtype)
    return 1 if dtype in ("pred", "token") or bits is None else max(1, int(bits[0]) // 8)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: Its name.
        shape: Its result.
        opcode: What it does.
        operands: The names of what it reads.
        attributes: The rest of the line.
        parameter: Which parameter of the computation it is, or None.
        constant: The value of a constant that is one integer, or None.
        is_root: Whether it is the result of the computation.
    """

    name: str
    shape: Shape
    opcode: str
    operands: tuple[str, ...]
    attributes: str = field(repr=False)
    parameter: int | None = None
    is_root: bool = False
    constant: int | None = None

    @property
    def cycles(self) -> int | None:
        """The compiler's cycle estimate, or None if it has none or a broken one."""
        found = _CYCLES.search(self.attributes)
        cycles = int(found[1]) if found else _MOST_CYCLES
        return cycles if cycles < _MOST_CYCLES else None

    @property
    def declared_flops(self) -> int | None:
        """The FLOPs that a custom call declares, or None."""
        found = _DECLARED.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def trips(self) -> int | None:
        """The trip count that the compiler notes for a loop, or None."""
        found = _TRIPS.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def op_name(self) -> str:
        """The name of its operation in the traced program, or ""."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    def called(self, role: str) -> str:
        """The computation in a role ("calls", "body", "to_apply"), or ""; the first one of a list in braces."""
        found = re.search(rf"\b{role}=\{{?%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""

    def attribute(self, name: str) -> str:
        """A plain attribute such as "kind", or ""."""
        found = re.search(rf'\b{name}="?([\w.\-]+)', self.attributes)
        return found[1] if found else ""


class Module:
    """A scheduled program: its computations by name."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] = []
        for line in text.splitlines():
            header = None if line.startswith(" ") else _HEADER.match(line)
            if header:
                current = self.computations[header[2]] = []
                self.entry = header[2] if header[1] else self.entry
            elif instruction := _instruction(line):
                current.append(instruction)

    def within(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instructions inside a fusion, including nested fusions."""
        for inner in self.computations.get(instruction.called("calls"), ()):
            yield inner
            yield from self.within(inner)

    def has_matmul(self, instruction: Instruction) -> bool:
        """Whether the instruction calls a computation with a matmul."""
        called = instruction.called("calls")
        return called in self._with_matmul

    @cached_property
    def _with_matmul(self) -> frozenset[str]:
        """Computations that contain a matmul or call one that does."""
        found: set[str] = set()
        while True:
            more = {
                name
                for name, body in self.computations.items()
                if name not in found
                and any(i.opcode in ("convolution", "dot") or i.called("calls") in found for i in body)
            }
            if not more:
                return frozenset(found)
            found |= more


def _instruction(line: str) -> Instruction | None:
    start = _START.match(line)
    if start is None:
        return None
    rest = line[start.end() :]
    end = _matching(rest, 0) if rest.startswith("(") else rest.index(" ")
    opcode, _, tail = rest[end:].lstrip().partition("(")
    arguments = tail[: _matching(f"({tail}", 0) - 1] if tail else ""
    operands = tuple(_OPERAND.findall(arguments))
    attributes, opcode = tail[len(arguments) :], opcode.strip()
    literal = arguments.rstrip(")")
    parameter = int(literal) if opcode == "parameter" else None
    constant = int(literal) if opcode == "constant" and _INTEGER.fullmatch(literal) else None
    return Instruction(
        start[2], Shape.read(rest[:end]), opcode, operands, attributes, parameter, bool(start[1]), constant
    )


def _matching(text: str, start: int) -> int:
    """The position after the parenthesis that matches the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == "(") - (text[position] == ")")
        if depth == 0:
            return position + 1
    return len(text)
