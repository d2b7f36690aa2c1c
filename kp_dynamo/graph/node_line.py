"""A node as one short line for people: `mm: bf16[2, 8] = aten.mm(x, w)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

_MAX_CHARACTERS = 110
_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
}  # fmt: skip
# Where and how eager keeps a tensor: in a program all are the same.
_PLACES = ("device", "layout", "pin_memory", "memory_format")


def node_line(node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Any) -> str:
    """The line of a node with these fields, which may be those it had before an edit; a long one is cut."""
    if node.op == "output":
        return _cut(f"return {', '.join(map(str, args))}")
    if node.op == "placeholder":
        return _cut(f"{node.name}{kind_text(value)} = input")
    named = [f"{name}={_short(a)}" for name, a in kwargs.items() if name not in _PLACES]
    given = ", ".join([*map(_short, args), *named])
    name = _name(target) if node.op == "call_function" else f"{node.op} {target}"
    return _cut(f"{node.name}{kind_text(value)} = {name}({given})")


def _name(target: Any) -> str:
    """ "aten.mm", "aten.add.Tensor" or "getitem"."""
    is_operator = isinstance(target, torch._ops.OpOverload)
    return str(target).removesuffix(".default") if is_operator else str(getattr(target, "__name__", target))


def _short(value: object) -> str:
    return str(value).removeprefix("torch.")


def kind_text(value: object) -> str:
    """ ": f32[2, 8]" for a tensor, else ""; makes no guard on a symbolic size."""
    if not isinstance(value, torch.Tensor):
        return ""
    dtype = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
    return f": {dtype}[{', '.join(map(str, value.shape))}]"


def _cut(line: str) -> str:
    return line if len(line) <= _MAX_CHARACTERS else f"{line[: _MAX_CHARACTERS - 3]}..."
