"""Where the seeds of compiled random operators come from: torch's own CPU generator.

One draw a call makes `torch.manual_seed`, `torch.get_rng_state`, `torch.random.fork_rng` and
`torch.utils.checkpoint` mean for compiled programs what they mean everywhere in torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from kp_dynamo.compat import xla


def next_seed() -> torch.Tensor:
    """A 0-dim int64 CPU tensor, the seed input of one run of a program."""
    return torch.empty((), dtype=torch.int64).random_()


@contextlib.contextmanager
def untouched_device_seed() -> Iterator[None]:
    """Trace from a fixed seed, so that equal graphs hash equally, and give the user's own back afterwards."""
    xlac, device = xla.xlac(), str(xla.device())
    running = xlac._xla_get_rng_seed(device)
    xlac._xla_set_rng_seed(0, device)
    try:
        yield
    finally:
        xlac._xla_set_rng_seed(running, device)
