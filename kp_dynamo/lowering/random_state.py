"""Seeds of compiled random operators, drawn from torch's CPU generator.

Each call draws one seed, so `torch.manual_seed`, `torch.get_rng_state`, `torch.random.fork_rng` and
`torch.utils.checkpoint` work for compiled programs as everywhere in torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from kp_dynamo.compat import xla


def next_seed() -> torch.Tensor:
    """The seed input for one run of a program: a 0-dim int64 CPU tensor."""
    return torch.empty((), dtype=torch.int64).random_()


@contextlib.contextmanager
def untouched_device_seed() -> Iterator[None]:
    """Trace with a fixed seed, so that equal graphs have equal hashes, and restore the user's seed afterwards."""
    xlac, device = xla.xlac(), str(xla.device())
    running = xlac._xla_get_rng_seed(device)
    xlac._xla_set_rng_seed(0, device)
    try:
        yield
    finally:
        xlac._xla_set_rng_seed(running, device)
