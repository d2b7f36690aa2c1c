"""`scaling`: one model on slices of several sizes, each chip with as many samples on all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kp_dynamo.aot.compiling import aot_compile
from kp_dynamo.aot.resized_inputs import batch_of, resized
from kp_dynamo.aot.scaling_result import Scaling, Size
from kp_dynamo.aot.topologies import topology_of
from kp_dynamo.exceptions import TPUConfigurationError, TPUOutOfMemoryError
from kp_dynamo.sharding.mesh import DATA, NamedMesh


def scaling(
    model: Callable[..., Any],
    args: Sequence[Any],
    chips: Sequence[int],
    *,
    target: str = "v5e",
    mesh: Mapping[str, int] | None = None,
    sharding: Any = "fsdp",
    options: Any = None,
    train: bool = False,
) -> Scaling:
    """Compile a model for slices of several sizes with `aot_compile`, each chip with as many samples.

    Args:
        model: A module or function, as for `aot_compile`.
        args: Its arguments at the batch of the first slice. Every tensor that begins with that batch is resized.
        chips: The numbers of chips, such as (4, 16, 64).
        target: The generation.
        mesh: The axes besides "data", such as {"model": 4}; "data" takes the other devices. None: all are along
            "data".
        sharding: As for `aot_compile`.
        options: As for `torch.compile`.
        train: With the backward.

    Raises:
        TPUConfigurationError: Numbers that are not sold, or that the mesh or the batch does not divide.
        TPUNotAvailableError: The TPU compiler is not installed.
        XLACompilationError: A slice fails to compile for another reason than too little memory.
    """
    numbers = _checked(chips, target, mesh or {})
    samples = batch_of(args)
    if any(samples * number % numbers[0] for number in numbers):
        raise TPUConfigurationError(
            f"a batch of {samples} on {numbers[0]} chips is not a whole number of samples on {list(numbers)}. Try: a "
            f"multiple of {numbers[0]}."
        )
    how = {"target": target, "sharding": sharding, "options": options, "train": train}
    sizes = []
    for number in numbers:
        batch, axes = samples * number // numbers[0], _mesh(topology_of(target, number).num_devices, mesh or {})
        try:
            sizes.append(Size(number, batch, aot_compile(model, resized(args, batch), chips=number, mesh=axes, **how)))
        except TPUOutOfMemoryError as problem:
            sizes.append(Size(number, batch, None, str(problem).split(". ", 1)[0]))
    return Scaling(target, str(sharding), tuple(sizes))


def _checked(chips: Sequence[int], target: str, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """The numbers of chips. Each slice is sold, has more than one chip, and is divided by the mesh."""
    numbers = tuple(chips) if isinstance(chips, Sequence) and not isinstance(chips, str) else ()
    if not numbers or len(set(numbers)) < len(numbers) or not all(type(n) is int and n > 1 for n in numbers):
        raise TPUConfigurationError(f"chips={chips!r} is invalid. Allowed: different numbers > 1, such as (4, 16, 64).")
    if mesh and DATA in NamedMesh.of(mesh).names:
        raise TPUConfigurationError(
            f"mesh={mesh} has {DATA!r}, which takes the chips that are left. Try: leave it out."
        )
    for number in numbers:
        devices = topology_of(target, number).num_devices
        if mesh and devices % NamedMesh.of(mesh).num_devices:
            what = f"{number} chips" if devices == number else f"the {devices} devices of {number} chips"
            raise TPUConfigurationError(f"{what} do not divide among mesh={dict(mesh)}. Try: another number.")
    return numbers


def _mesh(num_devices: int, mesh: Mapping[str, int]) -> dict[str, int]:
    others = NamedMesh.of(mesh).num_devices if mesh else 1
    return {DATA: num_devices // others, **mesh}
