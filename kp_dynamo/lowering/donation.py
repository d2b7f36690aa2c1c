"""Buffers that a program may take for its results: those of arguments that the graph overwrites.

Which arguments: `plan`, once a program. A buffer whose argument is also a result, or is cloned behind the program, is
kept. Whether a tensor is alone with its buffer: `Donors`, at every call. torch_xla's tensors share buffers without
being views of each other: `b.copy_(a)`, `a.clone()` and every operation that has not run yet hold a's buffer, and there
is no count of the holders. But a tensor that got its buffer as the result of a program, and has been read by programs
alone since, has no node of torch_xla's lazy graph; and every way to share a buffer goes through such a node. So

* after a call, the tensors that it has overwritten are noted with their buffers, if no view of them lives;
* at the next call, what is noted, and unchanged since, is given away; of all others a fresh copy is.
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
    """What of a program is donated.

    Attributes:
        arguments: Positions of graph arguments.
        inputs: The same, as inputs of the program.
        renewed: (argument, root): results that are the new value of an argument, and no other result of the graph.
        kept: (argument, reason) of arguments that the graph overwrites, and that keep their buffers.
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
    """What to donate of a traced program.

    Args:
        inputs: Of the program.
        outputs: Of the graph.
        overwritten: The arguments that the first outputs are the new values of; None for those that must be kept.
        uneven: Arguments of which devices have parts of different sizes: a copy of one is whole on every device.
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
            kept.append((argument, "the devices share it out unevenly"))
            continue
        donated.append(argument)
        if output.kind == "root" and times[output.value] == 1:
            renewed.append((argument, output.value))
    by_input = sorted(donated, key=input_of.__getitem__)
    return Donation(tuple(by_input), tuple(input_of[a] for a in by_input), tuple(renewed), tuple(kept))


def mark(placeholders: Sequence[Any], donation: Donation) -> None:
    """Have the program that is compiled next take these buffers; under `alias_with_buffer_donor_config`."""
    for argument in donation.arguments:
        xla.xlac()._set_buffer_donation(placeholders[argument], True)


class _Note(NamedTuple):
    """Of a tensor that is alone with its buffer: torch_xla's name of that, and a result that keeps the name taken."""

    name: str
    holder: torch.Tensor


class Donors:
    """Knows which tensors are alone with their buffers. Thread-safe; tensors are held weakly."""

    def __init__(self) -> None:
        self._notes: Any = WeakIdKeyDictionary()
        self._renewed: Any = WeakIdKeyDictionary()
        self._lock = threading.Lock()

    def give(self, values: list[Any], positions: Sequence[int]) -> None:
        """Replace in `values` what is not alone with its buffer by a copy that is. CPU tensors get a buffer anyway."""
        with self._lock:
            shared = [i for i in positions if values[i].device.type == "xla" and not self._take(values[i])]
        TELEMETRY.count("donated_buffers", len(positions))
        TELEMETRY.count("copied_before_donation", len(shared))
        if not shared:
            return
        with torch.no_grad():
            copies = [values[i].clone() for i in shared]
        # torch_xla gives a clone its own buffer when it is synchronised.
        xla.xlac()._xla_sync_multi(copies, devices=[], wait=False, sync_xla_data=False)
        for i, copy in zip(shared, copies, strict=True):
            values[i] = copy

    def _take(self, tensor: torch.Tensor) -> bool:
        note = self._notes.pop(tensor, None)
        return note is not None and not _has_view(tensor) and _buffer_name(tensor) == note.name

    def renew(self, tensor: torch.Tensor, result: torch.Tensor) -> None:
        """The caller is about to copy `result` over `tensor`."""
        if tensor.device.type == "xla":
            with self._lock:
                self._renewed[tensor] = result

    def record_donated(self, tensors: Iterable[Any]) -> None:
        """Note which of these are alone with their buffers, now that results have been copied over them."""
        with self._lock:
            renewed = [(t, self._renewed.pop(t)) for t in tensors if isinstance(t, torch.Tensor) and t in self._renewed]
        new = [(t, result) for t, result in renewed if not _has_view(t)]
        if not new:
            return
        # A copy is a node of the lazy graph until it is synchronised; this runs no program.
        xla.xlac()._xla_sync_multi([t for t, _ in new], devices=[], wait=False, sync_xla_data=False)
        with self._lock:
            for tensor, result in new:
                if (name := _buffer_name(tensor)) is not None:
                    self._notes[tensor] = _Note(name, result)


def _has_view(tensor: torch.Tensor) -> bool:
    """Whether a view of a tensor lives, or one may that nobody sees."""
    if not torch._is_functional_tensor(tensor):
        return True
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) != 1


def _buffer_name(tensor: torch.Tensor) -> str | None:
    """torch_xla's name of the buffer of a tensor; None where the tensor has a node of the lazy graph."""
    name = str(xla.xlac()._unique_id_for_ir_and_data(tensor))
    return None if "," in name else name


DONORS = Donors()
