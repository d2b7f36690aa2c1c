"""The parts of a stored capture's key that are the same for all captures of a process."""

from __future__ import annotations

import os
import sys
from functools import cache

import torch

from kp_dynamo.cache.compile_key import Parts
from kp_dynamo.cache.identity import Uncacheable
from kp_dynamo.compat import chips, own_source, xla
from kp_dynamo.compat.versions import version_of
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.disk_cache import enable
from kp_dynamo.disk_cache.samples import sampled

_LIBRARIES = ("torch", "torch_xla", "libtpu", "numpy", "sympy", "networkx", "opt_einsum")
_VARIABLES = ("XLA_", "LIBTPU_", "TORCH_", "PYTORCH_", "PJRT_", "KP_TPU_", "TPU_MEGACORE")
# Those of the cache, of logs, and what torchrun sets.
_NO_SETTINGS = ("KP_TPU_CACHE_", "KP_TPU_LOG", "TORCH_LOGS", "TORCH_TRACE", "TORCH_NCCL_")


def process_parts(options: CompileOptions) -> Parts:
    """What a capture depends on besides its key in this process.

    Raises:
        Uncacheable: The source of this package is not what this process runs.
        OSError: A file that belongs to the key cannot be read.
    """
    if own_source.is_newer_than_this_process():
        raise Uncacheable("the source of kp_dynamo, which changed after the process had started")
    return (
        *_fixed_parts(),
        ("variables", tuple(sorted((n, v) for n, v in os.environ.items() if _is_setting(n)))),
        ("spread", repr(options.spread)),
        ("settings", _settings()),
    )


def _is_setting(name: str) -> bool:
    return name.startswith(_VARIABLES) and not name.startswith(_NO_SETTINGS)


def _settings() -> tuple[object, ...]:
    """Settings of torch that AOTAutograd's trace on the CPU may read, besides those in the key."""
    einsum = torch.backends.opt_einsum
    return (
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch._C._get_deterministic_fill_uninitialized_memory(),
        torch._C._get_math_sdp_allow_fp16_bf16_reduction(),
        torch.backends.mha.get_fastpath_enabled(),
        (torch._C._get_mkldnn_enabled(), torch.backends.cpu.get_cpu_capability()),
        (einsum.is_available(), einsum.enabled, einsum.strategy),
    )


@cache
def _fixed_parts() -> Parts:
    return (
        ("python", sys.version),
        ("builds", (torch.version.git_version, *((name, version_of(name)) for name in _LIBRARIES))),
        ("source", own_source.source_digest()),
        ("plugin", _plugin()),
        ("chip", (chips.chip_name(), xla.num_devices(), xla.world()[0])),
    )


def _plugin() -> object:
    """The device's plugin, without its date: it differs on each machine."""
    cache = enable.in_front()
    return None if cache is None else sampled(cache.plugin)
