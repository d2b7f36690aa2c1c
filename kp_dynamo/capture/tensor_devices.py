"""The device of the tensors of a captured graph: the CPU or the XLA device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kp_dynamo.exceptions import TPUDeviceError

_MOST_NAMED = 4
_NO_NAMES: Mapping[int, str] = {}


def placement_mode(tensors: Sequence[torch.Tensor], default: str, names: Mapping[int, str] = _NO_NAMES) -> str:
    """ "cpu" if inputs must be placed, "xla" if they are on the device already.

    0-dim CPU tensors can be mixed with either, as in eager.

    Args:
        tensors: Those that a graph reads.
        default: The mode of a graph that reads none.
        names: By the ids of tensors, their names in Python.

    Raises:
        TPUDeviceError: Tensors on both, on a device that is neither, or on an XLA device that is not the first.
    """
    other = [t for t in tensors if t.device.type == "xla" and t.device.index not in (None, 0)]
    if other:
        # torch_xla 2.9 aborts the process if a program gets a buffer of another device.
        raise TPUDeviceError(
            f"a graph input is on {other[0].device} (shape {tuple(other[0].shape)}); compiled programs run on xla:0. "
            "Allowed: all on the CPU, or all on xla:0. Try: move model and inputs with .to('xla:0')."
        )
    foreign = [t for t in tensors if t.device.type not in ("cpu", "xla")]
    on_cpu = [t for t in tensors if t.device.type == "cpu" and t.dim() > 0]
    on_xla = [t for t in tensors if t.device.type == "xla"]
    if foreign:
        native = foreign[0].device.type == "tpu"
        raise TPUDeviceError(
            f"a graph input is on {foreign[0].device} (shape {tuple(foreign[0].shape)})"
            f"{', the native TPU device of PyTorch, which this version does not support' if native else ''}. "
            "Allowed: all on the CPU, or all on the XLA device. Try: move it with .to('cpu') or .to('xla')."
        )
    if on_cpu and on_xla:
        first = f"the first of these has shape {tuple(on_cpu[0].shape)}"
        raise TPUDeviceError(
            f"{len(on_xla)} graph inputs are on {on_xla[0].device}{_noted(_named(on_xla, names))} and {len(on_cpu)} on "
            f"the CPU{_noted(_named(on_cpu, names), first)}. "
            "Allowed: all on the CPU, or all on the XLA device. Try: move model and inputs with .to('xla')."
        )
    return "xla" if on_xla else "cpu" if any(t.device.type == "cpu" for t in tensors) else default


def _named(tensors: Sequence[torch.Tensor], names: Mapping[int, str]) -> str:
    """ "x, layers.0.weight, ..."; "" if no name is known."""
    known = [name for t in tensors if (name := names.get(id(t)))]
    return ", ".join([*known[:_MOST_NAMED], *(["..."] if len(known) > _MOST_NAMED else [])])


def _noted(*notes: str) -> str:
    """The notes that are not empty, in parentheses."""
    given = [note for note in notes if note]
    return f" ({'; '.join(given)})" if given else ""
