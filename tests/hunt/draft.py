"""A program under construction: statement after statement, each tried eagerly for every call before it is kept.

So a family proposes text, and need not know whether shapes and dtypes fit: what raises, or leaves the numbers that
rounding can be judged by, is dropped.
"""

from __future__ import annotations

import contextlib
import re
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from tests.hunt import values
from tests.hunt.program import MODES, Input, namespace

MAX_ELEMENTS = 4096
MAX_SIZE = 1e4
Wanted = Callable[[torch.Tensor], bool]


@dataclass
class Draft:
    """Statements so far, and what their names stand for in each call.

    Attributes:
        draw: Hypothesis's.
        sizes: Of each symbol ("B", "L"), for each call.
        modes: Of each call.
        allows_extremes: Whether numbers may be so large that rounding cannot be judged: masks.
        returned: Values that are results although they are read.
        has_buckets: Sizes that vary are padded: then few programs write to inputs or return views of them, which is
            refused by name.
    """

    draw: Callable[[st.SearchStrategy[Any]], Any]
    sizes: dict[str, tuple[int, ...]]
    modes: tuple[str, ...]
    inputs: list[Input] = field(default_factory=list)
    prelude: list[str] = field(default_factory=list)
    init: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    random: list[str] = field(default_factory=list)
    returned: list[str] = field(default_factory=list)
    families: list[str] = field(default_factory=list)
    allows_extremes: bool = False
    has_buckets: bool = False

    def __post_init__(self) -> None:
        self.calls = [namespace(None) for _ in self.modes]
        for call, mode in zip(self.calls, self.modes, strict=True):
            call["self"] = nn.Module().train(MODES[mode][0])
        self._numbers: dict[str, int] = {}

    def choose(self, *options: Any) -> Any:
        """One of these; the first is the simplest."""
        return self.draw(st.sampled_from(options))

    def chance(self, one_in: int) -> bool:
        """True once in so many."""
        return bool(self.draw(st.integers(0, one_in - 1)) == one_in - 1)

    def fresh(self, prefix: str = "h") -> str:
        self._numbers[prefix] = self._numbers.get(prefix, 0) + 1
        return f"{prefix}{self._numbers[prefix]}"

    def argument(self, dims: tuple[str | int, ...], recipe: str = "normal", dtype: str = "float32", **more: Any) -> str:
        """A new input with these dimensions: symbols or numbers."""
        name = more.pop("name", None) or self.fresh("x")
        shapes = tuple(
            tuple(self.sizes[d][call] if isinstance(d, str) else d for d in dims) for call in range(len(self.modes))
        )
        varying = tuple(i for i, d in enumerate(dims) if isinstance(d, str))
        spec = Input(name, dtype, recipe, shapes, varying, **more)
        self.inputs.append(spec)
        for number, call in enumerate(self.calls):
            made = values.make(recipe, shapes[number], getattr(torch, dtype), number)
            if spec.layout == "transposed" and made.dim() > 1:
                made = made.transpose(0, -1).contiguous().transpose(0, -1)
            needs = spec.requires_grad and MODES[self.modes[number]][1] == "grad"
            call[name] = made.requires_grad_(needs)
        self.names.append(name)
        return name

    def define(self, text: str) -> None:
        """A class or function in front of the model."""
        text = textwrap.dedent(text).strip()
        if text not in self.prelude:
            self.prelude.append(text)
            for call in self.calls:
                exec(text, call)

    def attribute(self, expression: str, prefix: str = "m") -> str | None:
        """`self.NAME = expression` in the constructor, a module or parameter; the name with `self.`."""
        name = self.fresh(prefix)
        return f"self.{name}" if self.setup(f"self.{name} = {expression}") else None

    def buffer(self, expression: str, prefix: str = "state") -> str | None:
        """`self.register_buffer(NAME, expression)`; the name with `self.`."""
        name = self.fresh(prefix)
        return f"self.{name}" if self.setup(f'self.register_buffer("{name}", {expression})') else None

    def setup(self, statement: str) -> bool:
        """A statement of the constructor."""
        if not self._run(statement, is_setup=True):
            return False
        self.init.append(statement)
        return True

    def let(self, expression: str, prefix: str = "h") -> str | None:
        """`NAME = expression`; None where it does not fit."""
        name = self.fresh(prefix)
        return name if self.block(f"{name} = {expression}", name) else None

    def block(self, text: str, *defines: str) -> bool:
        """Statements that define names; False, and nothing defined, where they do not fit."""
        text = textwrap.dedent(text).strip()
        if not self._run(text) or not all(self._is_good(name) for name in defines):
            for call in self.calls:
                for name in defines:
                    call.pop(name, None)
            return False
        self.body.append(text)
        self.names.extend(name for name in defines if name not in self.names)
        return True

    def drawn(self, expression: str) -> str | None:
        """`let`, of a random operator, whose result becomes one of the program's."""
        name = self.let(expression, "random")
        if name is not None:
            self.random.append(name)
        return name

    def value(self, name: str) -> torch.Tensor:
        """What a name stands for in the first call."""
        return eval(name, self.calls[0])

    def pick(self, wanted: Wanted = lambda v: True) -> str | None:
        """A name whose tensors in all calls are wanted; more often a late one."""
        fitting = [n for n in self.names if self._fits(n, wanted)]
        if not fitting:
            return None
        return self.choose(*reversed(fitting[-3:])) if self.chance(2) else self.choose(*reversed(fitting))

    def like(self, name: str, wanted: Wanted = lambda v: True) -> str | None:
        """Another name of the same shape and dtype, in all calls."""
        fitting = []
        for other in self.names:
            pairs = [(call[name], call.get(other)) for call in self.calls]
            if other != name and all(
                isinstance(b, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype and wanted(b)
                for a, b in pairs
            ):
                fitting.append(other)
        return self.choose(*fitting) if fitting else None

    def inputs_like(self, wanted: Wanted = lambda v: True) -> list[str]:
        """Names of inputs that are wanted in all calls."""
        return [spec.name for spec in self.inputs if self._fits(spec.name, wanted)]

    def dims(self, name: str) -> tuple[str | int, ...]:
        """Dimensions of an input, as symbols and numbers; of other values numbers where calls agree."""
        shapes = [call[name].shape for call in self.calls]
        found: list[str | int] = []
        for sizes in zip(*shapes, strict=True):
            symbol = next((s for s, values in self.sizes.items() if values == tuple(sizes)), None)
            found.append(symbol if symbol is not None else int(sizes[0]))
        return tuple(found)

    def size(self, name: str, dim: int) -> str:
        """How a source writes the size: a number where all calls have it and nothing varies."""
        sizes = {call[name].shape[dim] for call in self.calls}
        if len(sizes) == 1 and not self.chance(3):
            return str(sizes.pop())
        return self.choose(f"{name}.shape[{dim}]", f"{name}.size({dim})")

    def _fits(self, name: str, wanted: Wanted) -> bool:
        values = [call.get(name) for call in self.calls]
        return all(isinstance(v, torch.Tensor) for v in values) and all(wanted(v) for v in values)

    def _run(self, text: str, *, is_setup: bool = False) -> bool:
        code = compile(text, "<draft>", "exec")
        for call, mode in zip(self.calls, self.modes, strict=True):
            grad_mode = contextlib.nullcontext() if is_setup else _GRAD_MODES[MODES[mode][1]]()
            try:
                with warnings.catch_warnings(), grad_mode:
                    warnings.simplefilter("ignore")
                    exec(code, call)
                    if is_setup:
                        call["self"].train(MODES[mode][0])
            except Exception:  # noqa: BLE001
                return False
        return True

    def _is_good(self, name: str) -> bool:
        for call in self.calls:
            value = call.get(name)
            if not isinstance(value, torch.Tensor):
                continue
            if value.numel() > MAX_ELEMENTS or value.is_sparse:
                return False
            if value.is_floating_point() and not self.allows_extremes and value.numel():
                finite = value.detach().abs().max().item()
                if not finite < MAX_SIZE:
                    return False
        return True

    def source(self, results: list[str]) -> str:
        """The text of the program."""
        arguments = ", ".join(spec.name for spec in self.inputs)
        returned = ", ".join(results) + ("," if len(results) == 1 and self.random else "")
        lines = [*self.prelude, "", "class Model(nn.Module):"]
        if self.init:
            lines += ["    def __init__(self):", "        super().__init__()"]
            lines += [textwrap.indent(line, " " * 8) for line in self.init]
        lines += [f"    def forward(self, {arguments}):"]
        lines += [textwrap.indent(line, " " * 8) for line in self.body]
        lines += [f"        return {returned}"]
        return "\n".join(lines).strip() + "\n"

    def is_view_of_input(self, name: str) -> bool:
        """Whether a value shares memory with an input."""
        call = self.calls[0]
        memory = call[name].untyped_storage().data_ptr()
        return any(call[spec.name].untyped_storage().data_ptr() == memory for spec in self.inputs)

    def unused(self) -> list[str]:
        """Names of tensors that no later statement reads."""
        found = []
        for name in self.names:
            if not self._fits(name, lambda v: True) or name in {spec.name for spec in self.inputs}:
                continue
            readers = sum(len(re.findall(rf"\b{name}\b", text)) for text in self.body)
            if readers <= 1:
                found.append(name)
        return found


_GRAD_MODES: dict[str, Callable[[], Any]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
