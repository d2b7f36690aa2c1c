"""A model and its sample inputs: check, move, call, and restore."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from kp_dynamo.aot.request import require_shapes
from kp_dynamo.api.environment import of_type
from kp_dynamo.exceptions import TPUBackendError, TPUDeviceError, TPUModelPreparationError
from kp_dynamo.explanation.run_once import run_backward, uncompiled

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SampleInputs:
    """The inputs of a model, as positional or keyword arguments."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Any) -> SampleInputs:
        """From a tuple or list of positional arguments, a dict of keyword arguments, or a single argument."""
        if isinstance(given, tuple | list):
            return cls(tuple(given))
        return cls((), dict(given)) if isinstance(given, Mapping) else cls((given,))

    def on_device_of(self, model: nn.Module) -> SampleInputs:
        """A copy for one call, which may write to it, with the tensors where the model is."""
        device, memo = device_of(model), dict[int, Any]()

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return _copied(tensor, device, memo)

        return SampleInputs(*pytree.tree_map_only(torch.Tensor, moved, (self.args, dict(self.kwargs))))

    def call(self, model: Callable[..., Any]) -> Any:
        """Call `model`."""
        return model(*self.args, **self.kwargs)

    def signature(self) -> object:
        """Cache key: structure, shapes, dtypes and devices of tensors, and values of everything else."""
        leaves, tree = pytree.tree_flatten((self.args, dict(self.kwargs)))
        return str(tree), tuple(
            (tuple(x.shape), x.dtype, x.device.type) if isinstance(x, torch.Tensor) else repr(x) for x in leaves
        )

    def by_position(self, model: nn.Module) -> tuple[nn.Module, tuple[Any, ...]]:
        """`model`, wrapped if need be, and these inputs as positional arguments."""
        return (_WithKeywords(model), (self.args, dict(self.kwargs))) if self.kwargs else (model, self.args)


class _WithKeywords(nn.Module):
    """Takes the arguments of `model` as a tuple and a dict."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.model(*args, **kwargs)


def _copied(tensor: torch.Tensor, device: torch.device, memo: dict[int, Any]) -> torch.Tensor:
    """A copy on `device`; `memo` is that of `copy.deepcopy`: inputs that are one tensor, or share memory, still do."""
    if id(tensor) not in memo:
        leaf = tensor if tensor.is_leaf else tensor.detach()
        moved = leaf.to(device)
        if moved is leaf and leaf.is_nested:  # deepcopy refuses one with strides
            moved = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        elif moved is leaf:
            with torch.inference_mode(tensor.is_inference()):
                moved = copy.deepcopy(leaf, memo)
        if not tensor.is_leaf:  # autograd refuses writes to a leaf
            with torch.enable_grad():
                moved = moved.requires_grad_().clone()
        memo[id(tensor)] = moved
    return memo[id(tensor)]  # type: ignore[no-any-return]


def checked_model(model: Any) -> nn.Module:
    """The module; of a compiled one, the original. No module, or a lazy one, raises TPUModelPreparationError."""
    module = uncompiled(of_type(nn.Module, "model", model, TPUModelPreparationError, "a torch.nn.Module"))
    assert isinstance(module, nn.Module), "inside a compiled module is a module"
    require_shapes(dict([*module.named_parameters(), *module.named_buffers()]))
    return module


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's parameters and buffers, the CPU if it has none; several raise TPUDeviceError."""
    found = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    if len(found) > 1:
        raise TPUDeviceError(
            f"the model is on several devices: {', '.join(sorted(map(str, found)))}. Allowed: one device. "
            "Try: move it with TPUBackend.prepare_model."
        )
    return found.pop() if found else torch.device("cpu")


def move(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model in place, or raise TPUModelPreparationError; `Module.to` alone unties tied tensors on XLA."""
    places = [(held, name, tensor) for held in _held_tensors(model) for name, tensor in held.items()]
    try:
        model.to(device)
    except (RuntimeError, NotImplementedError) as cause:
        raise TPUModelPreparationError(f"the model cannot be moved to {device}: {cause}") from cause
    moved: dict[int, Any] = {id(None): None}
    for held, name, before in places:
        held[name] = moved.setdefault(id(before), held[name])
    return model


def move_data(
    data: Any, device: torch.device, error: type[TPUBackendError], *, copy: bool = False, name: str = "data"
) -> Any:
    """`data`, nested dicts, lists and tuples, with its tensors on `device`; raises `error` if it has none.

    `name` is what the caller's user calls it.
    """
    leaves = pytree.tree_leaves(data)
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
        raise error(
            f"{name} contains no tensor, only {kinds}. Allowed: a tensor, or dicts, lists and tuples of tensors. "
            f"Try: torch.as_tensor for arrays, dict({name}) for other mappings."
        )
    _require_plain(leaves, error, name)
    try:
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, copy=copy), data)
    except (RuntimeError, NotImplementedError, ValueError) as cause:
        reason = str(cause).splitlines()[0]
        raise error(
            f"{name} cannot be moved to {device}: {reason}. Allowed: dense tensors with values. Try: to_dense() for "
            "sparse tensors, pad_packed_sequence for packed ones."
        ) from cause


_PLAIN = (torch.Tensor, int, float, str)  # no union of types, which Dynamo cannot trace


def opened(leaf: Any) -> Any:
    """The content of a mapping or dataclass that pytree does not know, such as a BatchEncoding; else `leaf`."""
    if leaf is None or isinstance(leaf, _PLAIN):
        return leaf  # Dynamo breaks the graph if it is asked whether None is a dataclass
    if isinstance(leaf, Mapping):
        return dict(leaf)
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return {part.name: getattr(leaf, part.name, None) for part in fields(leaf)}
    return leaf


def _require_plain(leaves: Sequence[Any], error: type[TPUBackendError], name: str) -> None:
    """Raise if a leaf has tensors inside, which would stay where they are."""
    for leaf in leaves:
        inside = opened(leaf)
        if inside is not leaf and any(isinstance(part, torch.Tensor) for part in pytree.tree_leaves(inside)):
            raise error(
                f"{name} has tensors inside of a {type(leaf).__name__}, which would stay where they are. Allowed: "
                "tensors in dicts, lists and tuples. Try: dict() of a mapping, vars() of a dataclass, or "
                "torch.utils._pytree.register_dataclass for its class."
            )


def _held_tensors(model: nn.Module) -> list[dict[str, Any]]:
    """The parameters and the buffers of each module, by name."""
    return [held for module in model.modules() for held in (module._parameters, module._buffers)]


def run_once(model: nn.Module, compiled: Callable[..., Any], inputs: SampleInputs) -> None:
    """Call `compiled`, and its backward where gradients are enabled; `model` is unchanged."""
    with unchanged(model):
        results = inputs.call(compiled)
        if torch.is_grad_enabled():
            run_backward(results, model)


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers and torch's random state after the block, which may call the model.

    Parameters and buffers that the model reassigns are restored too. In-place writes to parameters are not undone,
    because a copy would double their memory; a logged warning names these parameters.
    """
    held_before = [(held, dict(held)) for held in _held_tensors(model)]
    values = [(buffer, buffer.clone(), _version(buffer)) for buffer in model.buffers()]
    versions = [(name, p, _version(p)) for name, p in model.named_parameters()]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for held, before in held_before:
            held.clear()
            held.update(before)
        for buffer, value, version in values:
            _restore(buffer, value, version)
        if written := [name for name, parameter, version in versions if _version(parameter) != version]:
            text = "calling the model once changed it: its forward writes to %s in place. Try: register it as a buffer."
            logger.warning(text, ", ".join(written))


def _version(tensor: torch.Tensor) -> int:
    """The version counter; 0 for an inference tensor, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def _restore(buffer: torch.Tensor, value: torch.Tensor, version: int) -> None:
    """Write the old value if it changed; an expanded buffer cannot be written and is left alone if unchanged."""
    # Comparing on the device would compile a program.
    is_on_cpu = buffer.device.type == "cpu" and buffer.layout is torch.strided
    is_there = torch.equal(buffer, value) if is_on_cpu else _version(buffer) == version
    if not is_there:
        with torch.inference_mode(buffer.is_inference()), torch.no_grad():
            buffer.copy_(value)
