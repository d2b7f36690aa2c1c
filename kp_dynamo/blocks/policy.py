"""The figures and thresholds of `blocks="auto"`. The rule that compares them is in `session/division_cost.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kp_dynamo.blocks.node_effects import Effects
from kp_dynamo.hardware import Chip

LEAST_REPEATS = {"auto": 3, "on": 2}
"""Below three, compiling the layer once saves less than the extra programs around it cost."""
MAX_HOST_SHARE = 0.05
CALL_SECONDS = 50e-6
"""Host time of calling one more program, AOTAutograd's wrapper included: 21 us in inference, 52 in training."""
CHILD_SECONDS = 100e-6
"""As `CALL_SECONDS`, for the program of a child module: Dynamo's guards on the child are checked too."""
HOST_BYTES_PER_S = 10e9
"""Between host and device: PCIe 3.0 with 16 lanes, less its overhead."""
_LEAST_CALLS = 4


@dataclass(frozen=True)
class Speed:
    """How fast a device computes.

    Attributes:
        flops: Peak floating point operations a second.
        bytes_per_s: Memory bandwidth.
    """

    flops: float
    bytes_per_s: float


XLA_CPU = Speed(100e9, 10e9)
"""XLA's CPU device on two cores, float32: 130 GFLOP/s for a matmul of size 256, 10.5 GB/s for a sum."""


def speed_of(chip: Chip) -> Speed:
    """The peak figures of a chip, for bfloat16 matmuls."""
    return Speed(chip.bf16_flops, chip.hbm_bytes_per_s)


def is_block(effects: Sequence[Effects], count: int) -> bool:
    """Whether a repeated stretch is worth a program: a layer has a matmul, and more than that."""
    return sum(e.num_calls for e in effects) >= _LEAST_CALLS and any(e.flops for e in effects)


def step_seconds(pieces: Iterable[tuple[Sequence[Effects], int]], speed: Speed, *, trains: bool) -> float:
    """A lower bound of the time of a step: its matmuls at peak, or their operands at memory speed.

    Args:
        pieces: (effects of the calls of a piece, how many times it runs).
        speed: The device.
        trains: Whether there is a backward, which takes twice the time of the forward.
    """
    matmuls = ((e, runs) for effects, runs in pieces for e in effects if e.flops)
    forward = sum(runs * max(e.flops / speed.flops, e.num_bytes / speed.bytes_per_s) for e, runs in matmuls)
    return forward * (3 if trains else 1)


def group_sizes(blocks: Sequence[tuple[int, int]], least: int) -> list[int]:
    """How many layers a program may have, two or more; those that compile the fewest operators first.

    Args:
        blocks: (number of operators, how many times it occurs) of each layer.
        least: Least number of times that a program runs.
    """

    def compiled(layers: int) -> int:
        return sum(size * (layers + n % layers if n // layers >= least else n) for size, n in blocks)

    return sorted(range(2, max(n for _, n in blocks) // least + 1), key=lambda layers: (compiled(layers), layers))


def num_calls(blocks: Sequence[tuple[int, int]], least: int, layers: int) -> int:
    """The number of calls of programs of `layers` layers; see `group_sizes` for the other arguments."""
    return sum(n // layers for _, n in blocks if n // layers >= least)


def host_seconds(num_steps: int, *, trains: bool) -> float:
    """The host time that dividing a graph adds to a step."""
    return (num_steps - 1) * CALL_SECONDS * (2 if trains else 1)


def transfer_seconds(num_bytes: int) -> float:
    """The time of moving values between pieces to the host and back, and their gradients, in a training step."""
    return 4 * num_bytes / HOST_BYTES_PER_S
