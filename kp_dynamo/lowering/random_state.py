"""Seeds of compiled random operators, drawn from torch's CPU generator.

Each call draws one seed, so `torch.manual_seed`, `torch.get_rng_state`, `torch.random.fork_rng` and
`torch.utils.checkpoint` work for compiled programs as everywhere in torch.

A graph may be divided into several programs, and with gradients in another way than without them. Its random numbers
are the same: torch_xla computes the seed of each random operator from that of the one before, and a program begins
with the seed at which the one before it ended.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kp_dynamo.compat import xla

# torch_xla 2.9, XLAGraphExecutor::GetRngSeed: the next seed is _FACTOR * seed + _TERM, modulo 2**64.
_FACTOR, _TERM = 214013, 2531011
_MOST_DRAWS = 1_000_000  # far more random operators than a graph has

_call = threading.local()


def next_seed(num_draws: int) -> torch.Tensor:
    """The seed input for one run of a program with this many draws: a 0-dim int64 CPU tensor."""
    seed = getattr(_call, "seed", None)
    if seed is None:
        seed = torch.empty((), dtype=torch.int64).random_()
    if getattr(_call, "is_one", False):
        _call.seed = _after(seed, num_draws)
    return seed


def _after(seed: torch.Tensor, num_draws: int) -> torch.Tensor:
    factor, term = _jump(num_draws)
    return seed * factor + term


@functools.cache
def _jump(num_draws: int) -> tuple[int, int]:
    """The factor and the term of as many steps, as int64: every call of a program needs them."""
    factor, term = 1, 0
    for _ in range(num_draws):
        factor, term = _FACTOR * factor % 2**64, (_FACTOR * term + _TERM) % 2**64
    return _signed(factor), _signed(term)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def with_one_seed(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, whose programs draw one seed together."""

    def called(*args: Any) -> Any:
        if getattr(_call, "is_one", False):  # a part of a larger graph
            return run(*args)
        _call.is_one = True
        try:
            return run(*args)
        finally:
            _call.is_one, _call.seed = False, None

    return called


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


def num_draws() -> int:
    """How many seeds the random operators have taken since the trace began, in `untouched_device_seed`."""
    running, seed = xla.xlac()._xla_get_rng_seed(str(xla.device())), 0
    for number in range(_MOST_DRAWS):
        if seed == running:
            return number
        seed = (_FACTOR * seed + _TERM) % 2**64
    raise AssertionError("torch_xla computes the seeds of random operators in another way than version 2.9")
