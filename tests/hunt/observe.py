"""Run a program, eagerly or compiled, and note all that a caller can see of it.

What is seen is a flat mapping: "call 1 result 0", "call 1 input x", "call 1 gradient of linear.weight", and at the
end, when every result of the last call has been written to, "end input x": who shares memory with whom.
"""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.hunt import values
from tests.hunt.program import MODES, Input, Program, namespace
from tests.hunt.randomness import Kept, replayed

Compile = Callable[[nn.Module], Callable[..., Any]]


@dataclass(frozen=True)
class Seen:
    """A tensor as a caller sees it.

    Attributes:
        value: A copy on the CPU.
        stride: None on XLA, whose tensors have none of their own.
        offsets: How many elements of its storage it starts behind each tensor of `shares`.
        shares: Names of the inputs, parameters, buffers and earlier results whose memory it shares, on the CPU.
    """

    value: torch.Tensor
    stride: tuple[int, ...] | None
    offsets: tuple[int, ...]
    shares: tuple[str, ...]
    requires_grad: bool


@dataclass(frozen=True)
class How:
    """One way to run a program.

    Attributes:
        compiled: Makes the callable from the model.
        floating: Replaces every floating-point dtype; None: as the program says.
        device: "cpu" or "xla".
        around: A context for calls, backwards and optimizer steps.
        random: What random operators returned in the run to be compared with, for each call.
        stepped: The run to be compared with: the optimizer steps by its gradients, which are judged as such. Adam makes
            a full step of a gradient that is nothing but rounding.
        kept: Gets what dropout kept.
        keeps_zeros: Whether dropout kept zeros rather than dropped them.
        written: Which results are written to at the end; None: all that can be.
        mark: Called with each argument before a call.
    """

    compiled: Compile | None = None
    floating: torch.dtype | None = None
    device: str = "cpu"
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    random: tuple[tuple[torch.Tensor, ...], ...] | None = None
    stepped: dict[str, Any] | None = None
    kept: list[Kept] | None = None
    keeps_zeros: bool = False
    written: tuple[bool, ...] | None = None
    mark: Callable[[Input, torch.Tensor], None] = lambda *_: None


Observation = dict[str, Any]


def observe(program: Program, how: How) -> Observation:
    """Everything that the calls of `program` show."""
    model = load(program, how)
    with _default_dtype(how.floating or torch.float32):
        return _Run(program, how, model).observe()


def load(program: Program, how: How) -> nn.Module:
    """The program's model with its weights, on the device."""
    defined = namespace(how.floating)
    name = f"<program {program.identity} {how.floating}>"
    # Dynamo, and tracebacks, look lines up there.
    linecache.cache[name] = (len(program.source), None, program.source.splitlines(keepends=True), name)
    exec(compile(program.source, name, "exec"), defined)
    torch.manual_seed(program.seed)
    model = defined["Model"]()
    if how.floating is not None:
        model = model.to(how.floating)
        _convert_plain(model, how.floating)
    if how.device != "cpu":
        model = model.to(how.device)
        _convert_plain(model, how.device)
    return model


def _convert_plain(model: nn.Module, to: Any) -> None:
    """What `Module.to` leaves: tensors that are neither parameters nor buffers."""
    for key, value in list(vars(model).items()):
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or not isinstance(to, torch.dtype)):
            setattr(model, key, value.to(to))


class _Run:
    def __init__(self, program: Program, how: How, model: nn.Module) -> None:
        self.program, self.how, self.model = program, how, model
        self.run = how.compiled(model) if how.compiled else model
        # Not around what makes inputs: random numbers are others within a dispatch mode.
        self.around = how.around()
        self.seen: Observation = {}
        self.kept: dict[str, torch.Tensor] = {}
        self.bases: dict[str, torch.Tensor] = {}
        self.results: dict[str, Any] = {}
        self.is_on_xla = program.configuration.device == "xla"
        parameters = list(model.parameters())
        self.optimizer = None
        if program.optimizer is not None and parameters:
            self.optimizer = eval(program.optimizer, {"torch": torch, "parameters": parameters})

    def observe(self) -> Observation:
        for number, mode in enumerate(self.program.modes):
            self._call(number, *MODES[mode])
        with _grad_mode(MODES[self.program.modes[-1]][1]):
            self._write_results()
        return self.seen

    def _call(self, number: int, is_training: bool, grad_mode: str) -> None:
        self.model.train(is_training)
        self.arguments = self._arguments(number, grad_mode)
        recorded = None if self.how.random is None else self.how.random[number]
        with _grad_mode(grad_mode), replayed(recorded, self.how.kept, keeps_zeros=self.how.keeps_zeros), self.around:
            result = self.run(*self.arguments.values())
        leaves, spec = pytree.tree_flatten(result)
        self.seen[f"call {number} structure"] = str(spec)
        self.results = {f"call {number} result {i}": leaf for i, leaf in enumerate(leaves)}
        self._note(self.results)
        self._note_state(f"call {number}")
        if grad_mode == "grad":
            self._backward(number, leaves)

    def _arguments(self, number: int, grad_mode: str) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = {}
        for position, spec in enumerate(self.program.inputs):
            if spec.layout == "overlapping":
                made[spec.name] = self.bases[f"base of {spec.same_as}"][: spec.shapes[number][0]].detach()
            elif spec.same_as is not None:
                made[spec.name] = made[spec.same_as]
            elif spec.is_kept and spec.name in self.kept:
                made[spec.name] = self.kept[spec.name]
            else:
                made[spec.name] = self._argument(spec, number, position)
                made[spec.name].requires_grad_(spec.requires_grad and grad_mode == "grad")
            self.kept[spec.name] = made[spec.name]
            self.how.mark(spec, made[spec.name])
        return made

    def _argument(self, spec: Input, number: int, position: int) -> torch.Tensor:
        dtype = getattr(torch, spec.dtype)
        shape = spec.shapes[number]
        with _default_dtype(torch.float32):  # random numbers of the default dtype float64 are others
            made = values.make(spec.values, shape, dtype, self.program.seed + 100 * number + position)
        if self.how.floating is not None and dtype.is_floating_point:
            made = made.to(self.how.floating)
        # Every XLA tensor is contiguous to torch, one that was transposed as well.
        if spec.layout == "transposed" and made.dim() > 1 and not (self.is_on_xla and self.how.device == "cpu"):
            return made.transpose(0, -1).contiguous().to(self.how.device).transpose(0, -1)
        if spec.layout == "offset" and made.dim() > 0:
            base = torch.cat([made[:1], made, made[:1]]) if made.shape[0] else made
            base = base.to(self.how.device)
            self.bases[f"base of {spec.name}"] = base
            return base[1 : 1 + made.shape[0]].detach() if made.shape[0] else base
        return made.to(self.how.device)

    def _state(self) -> dict[str, Any]:
        named = {f"input {name}": value for name, value in self.arguments.items()}
        # A module may hold tensors that are neither parameters nor buffers.
        plain = {n: v for n, v in vars(self.model).items() if isinstance(v, torch.Tensor | int | float) and n[0] != "_"}
        return {
            **named,
            **self.bases,
            **{f"state {n}": v for n, v in plain.items() if n not in ("training", "call_super_init", "dump_patches")},
            **{f"buffer {n}": v for n, v in self.model.named_buffers()},
            **{f"parameter {n}": v for n, v in self.model.named_parameters()},
        }

    def _note(self, named: dict[str, Any]) -> None:
        for name, value in named.items():
            self.seen[name] = self._look(name, value) if isinstance(value, torch.Tensor) else value

    def _note_state(self, prefix: str) -> None:
        for name, value in self._state().items():
            self.seen[f"{prefix} {name}"] = self._look(name, value) if isinstance(value, torch.Tensor) else value

    def _look(self, name: str, tensor: torch.Tensor) -> Seen:
        copied = tensor.detach().to("cpu", copy=True)
        # A conjugate or negative view is what it says, not how it is stored.
        copied = copied.resolve_conj().resolve_neg().clone()
        if tensor.device.type != "cpu":
            return Seen(copied, None, (), (), tensor.requires_grad)
        others = {**self._state(), **self.results} if "result" in name else {}
        own = name.removeprefix("end ")
        shares = sorted(n for n, other in others.items() if n != own and _overlap(tensor, other))
        offsets = tuple(tensor.storage_offset() - others[n].storage_offset() for n in shares)
        return Seen(copied, tensor.stride(), offsets, tuple(shares), tensor.requires_grad)

    def _backward(self, number: int, leaves: list[Any]) -> None:
        wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad and x.grad_fn is not None]
        named = {
            **{f"gradient of input {n}": t for n, t in self.arguments.items() if t.requires_grad},
            **{f"gradient of {n}": p for n, p in self.model.named_parameters()},
        }
        if not wanted:
            return
        if number == 1:
            wanted = wanted[:1]  # the others then have no gradient, as the logits of a model that returns its loss too
        for tensor in named.values():
            tensor.grad = None
        with self.around:
            sum(_weighted(result) for result in wanted).backward()
        for name, tensor in named.items():
            self._note({f"call {number} {name}": tensor.grad})
        if self.optimizer is not None:
            self._take_gradients(number)
            with self.around:
                self.optimizer.step()
            self._note_state(f"step {number}")

    def _take_gradients(self, number: int) -> None:
        for name, parameter in self.model.named_parameters():
            seen = (self.how.stepped or {}).get(f"call {number} gradient of {name}")
            if parameter.grad is not None and isinstance(seen, Seen) and seen.value.shape == parameter.shape:
                parameter.grad = seen.value.to(parameter.dtype, copy=True)

    def _write_results(self) -> None:
        """Write to each result, then look at everything: what is shared shows."""
        written = self.how.written or (True,) * len(self.results)
        self.seen["end written"] = tuple(
            may and _write(result) for may, result in zip(written, self.results.values(), strict=False)
        )
        self._note({f"end {name}": value for name, value in self.results.items()})
        self._note_state("end")


def _overlap(tensor: torch.Tensor, other: Any) -> bool:
    """Whether two CPU tensors have memory in common: elements of one lie between the first and last of the other."""
    if not isinstance(other, torch.Tensor) or other.device.type != "cpu" or not tensor.nbytes or not other.nbytes:
        return False
    if tensor.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    (first, last), (start, end) = _extent(tensor), _extent(other)
    return first <= end and start <= last


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    steps = sum(step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.storage_offset(), tensor.storage_offset() + steps


def _write(result: Any) -> bool:
    """Add 1; whether that can be done: where memory repeats, as it may on the CPU, the result is undefined."""
    if not isinstance(result, torch.Tensor) or result.dtype is torch.bool or _repeats(result):
        return False
    with torch.no_grad(), contextlib.suppress(RuntimeError):
        result.detach().add_(1)
        return True
    return False


def _repeats(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor on the CPU share memory, as windows of `unfold` do."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return False
    places = torch.zeros(tensor.shape, dtype=torch.int64)
    for dim, step in enumerate(tensor.stride()):
        shape = [-1 if d == dim else 1 for d in range(tensor.dim())]
        places += (torch.arange(tensor.shape[dim]) * step).reshape(shape)
    return len(set(places.flatten().tolist())) < tensor.numel()


def _weighted(result: torch.Tensor) -> torch.Tensor:
    if result.is_complex():
        result = torch.view_as_real(result)
    ramp = torch.linspace(-1.0, 1.3, max(result.numel(), 1), dtype=torch.float64)[: result.numel()]
    return (result * ramp.reshape(result.shape).to(result.dtype).to(result.device)).sum().to(torch.get_default_dtype())


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _grad_mode(name: str) -> Iterator[None]:
    mode = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[name]
    with mode():
        yield
