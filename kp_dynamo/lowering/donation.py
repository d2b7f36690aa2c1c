"""Donate the buffers of arguments that a graph overwrites: the program reuses them for its results.

`plan` selects the arguments, once per program. An argument that is also a result, or is cloned after the program, keeps
its buffer. `Donors` checks at every call whether a tensor owns its buffer alone. torch_xla's tensors share buffers
without being views of each other: `b.copy_(a)`, `a.clone()` and every pending operation hold a's buffer, and torch_xla
does not count the holders. But a tensor has no node in torch_xla's lazy graph if its buffer is the result of a program
and only programs have read it since; and sharing a buffer always needs such a node. So

* after a call, the overwritten tensors are recorded with their buffers, unless a view of them is alive;
* at the next call, a recorded and unchanged buffer is donated; for any other argument, a fresh copy is.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from kp_dynamo.compat import xla
from kp_dynamo.telemetry.counters import TELEMETRY

if TYPE_CHECKING:
    from kp_dynamo.lowering.program_inputs import Slot


@dataclass(frozen=True)
class Donation:
    """The donated inputs of a program.

    Attributes:
        arguments: Their positions among the graph's arguments.
        inputs: Their positions among the program's inputs.
        renewed: (argument, root): roots that are the new value of an argument, and no other result of the graph.
        kept: (argument, reason): arguments that the graph overwrites but that keep their buffers.
    """

    arguments: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    renewed: tuple[tuple[int, int], ...] = ()
    kept: tuple[tuple[int, str], ...] = ()


def plan(
    inputs: Sequence[Slot],
    outputs: Sequence[Slot],
    overwritten: Sequence[int | None],
    uneven: Collection[int] = (),
) -> Donation:
    """Select the inputs of a traced program to donate.

    Args:
        inputs: The program's inputs.
        outputs: The graph's outputs.
        overwritten: For each of the first outputs, the argument whose new value it is; None for an argument that must
            keep its buffer.
        uneven: Arguments that are sharded unevenly across devices: a copy of one is replicated.
    """
    input_of = {slot.value: i for i, slot in enumerate(inputs) if slot.kind == "argument"}
    returned = {slot.value for slot in outputs if slot.kind == "argument"}
    cloned = {slot.value for slot in outputs if slot.kind == "copy"}
    times = Counter(slot.value for slot in outputs if slot.kind in ("root", "root copy"))
    donated, renewed, kept = [], [], []
    for argument, output in zip(overwritten, outputs, strict=False):
        if argument is None or argument not in input_of:
            continue
        if argument in returned | cloned:
            kept.append((argument, f"the graph returns {'it' if argument in returned else 'its old value'}"))
            continue
        if argument in uneven:
            kept.append((argument, "it is sharded unevenly across the devices"))
            continue
        donated.append(argument)
        if output.kind == "root" and times[output.value] == 1:
            renewed.append((argument, output.value))
    by_input = sorted(donated, key=input_of.__getitem__)
    return Donation(tuple(by_input), tuple(input_of[a] for a in by_input), tuple(renewed), tuple(kept))


def mark(placeholders: Sequence[Any], donation: Donation) -> None:
    """Let the program that is compiled next reuse these buffers; requires `alias_with_buffer_donor_config`."""
    for argument in donation.arguments:
        xla.xlac()._set_buffer_donation(placeholders[argument], True)


class _Note(NamedTuple):
    """For a tensor that owns its buffer alone: torch_xla's name of the buffer, and a result that reserves the name."""

    name: str
    holder: torch.Tensor


class Donors:
    """Records which tensors own their buffers alone. Thread-safe; holds tensors weakly."""

    def __init__(self) -> None:
        self._notes: Any = WeakIdKeyDictionary()
        self._renewed: Any = WeakIdKeyDictionary()
        self._lock = threading.Lock()

    def give(self, values: list[Any], positions: Sequence[int]) -> None:
        """Replace each tensor in `values` that shares its buffer by a copy. CPU tensors get a new buffer anyway."""
        with self._lock:
            shared = [i for i in positions if values[i].device.type == "xla" and not self._take(values[i])]
        TELEMETRY.count("donated_buffers", len(positions))
        TELEMETRY.count("copied_before_donation", len(shared))
        if not shared:
            return
        with torch.no_grad():
            copies = [values[i].clone() for i in shared]
        # torch_xla gives a clone its own buffer when the clone is synchronized.
        xla.xlac()._xla_sync_multi(copies, devices=[], wait=False, sync_xla_data=False)
        for i, copy in zip(shared, copies, strict=True):
            values[i] = copy

    def _take(self, tensor: torch.Tensor) -> bool:
        note = self._notes.pop(tensor, None)
        return note is not None and not _has_view(tensor) and _buffer_name(tensor) == note.name

    def renew(self, tensor: torch.Tensor, result: torch.Tensor) -> None:
        """Record that the caller is about to copy `result` over `tensor`."""
        if tensor.device.type == "xla":
            with self._lock:
                self._renewed[tensor] = result

    def record_donated(self, tensors: Iterable[Any]) -> None:
        """Record which of these own their buffers alone, after results have been copied over them."""
        with self._lock:
            renewed = [(t, self._renewed.pop(t)) for t in tensors if isinstance(t, torch.Tensor) and t in self._renewed]
        new = [(t, result) for t, result in renewed if not _has_view(t)]
        if not new:
            return
        # A copy is a node of the lazy graph until it is synchronized. This runs no program.
        xla.xlac()._xla_sync_multi([t for t, _ in new], devices=[], wait=False, sync_xla_data=False)
        with self._lock:
            for tensor, result in new:
                if (name := _buffer_name(tensor)) is not None:
                    self._notes[tensor] = _Note(name, result)


def _has_view(tensor: torch.Tensor) -> bool:
    """Whether a view of a tensor is alive. True if that is unknown."""
    if not torch._is_functional_tensor(tensor):
        return True
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) != 1


def _buffer_name(tensor: torch.Tensor) -> str | None:
    """torch_xla's name of a tensor's buffer; None if the tensor has a node in the lazy graph."""
    name = str(xla.xlac()._unique_id_for_ir_and_data(tensor))
    return None if "," in name else name


DONORS = Donors()
