"""Import torch_xla once, undo its changes to torch even if somebody else imported it, and notice a fork."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from types import ModuleType

import torch

from kp_dynamo.compat import fast_extremes
from kp_dynamo.compat.versions import check_versions, earlier_version
from kp_dynamo.exceptions import TPUDeviceError, TPUNotAvailableError

logger = logging.getLogger(__name__)

# Settings of Dynamo that torch_xla 2.9 changes for every backend of the process, with the defaults of torch 2.9.
_CHANGED_BY_TORCH_XLA = {"automatic_dynamic_shapes": True, "specialize_float": False}

# Whether this process lost the XLA client in a fork; every compiled call reads it.
forked = False


def _after_fork() -> None:
    global forked
    forked = load.cache_info().currsize > 0


os.register_at_fork(after_in_child=_after_fork)


@functools.cache
def load() -> ModuleType:
    """Import torch_xla and return it, without changing torch's settings.

    Raises:
        TPUNotAvailableError: torch_xla is missing or cannot be imported.
        TPUConfigurationError: Its version does not fit torch's.
    """
    check_versions()
    import torch._dynamo.config as dynamo_config

    before = {name: getattr(dynamo_config, name) for name in _CHANGED_BY_TORCH_XLA}
    # Without an explicit device, torch_xla probes for a TPU's metadata server before it uses the CPU.
    if fast_extremes.is_on_cpu():
        os.environ["PJRT_DEVICE"] = "CPU"
    fast_extremes.keep_nan()
    is_first, gru = "torch_xla" not in sys.modules, torch.nn.GRU
    try:
        torch_xla = importlib.import_module("torch_xla")
    except (ImportError, OSError) as cause:
        raise TPUNotAvailableError(f"torch_xla is installed but cannot be imported: {cause}") from cause
    finally:
        # Earlier bridges fail at symbolic sizes, so they keep torch_xla's settings.
        for name, value in before.items() if earlier_version() is None else ():
            setattr(dynamo_config, name, value)
        if is_first:
            # torch_xla 2.9 replaces it with its own GRU, which fails on the CPU.
            torch.nn.GRU = gru  # type: ignore[misc]
    if not is_first:
        restore_torch()
    patch_torch_xla()
    return torch_xla


@functools.cache
def restore_torch() -> None:
    """Give torch back what torch_xla changed when somebody else imported it, such as the Trainer of transformers.

    What was set before that import is unknown, so the settings get torch's defaults. Once: what is set later stays.
    """
    if load.cache_info().currsize or earlier_version() is not None:
        return
    import torch._dynamo.config as dynamo_config
    from torch_xla.experimental.gru import GRU

    for name, default in _CHANGED_BY_TORCH_XLA.items():
        if getattr(dynamo_config, name) != default:
            logger.info("torch_xla had changed torch._dynamo.config.%s; it is %s again.", name, default)
            setattr(dynamo_config, name, default)
    if torch.nn.GRU is GRU:
        torch.nn.GRU = torch.nn.modules.rnn.GRU  # type: ignore[misc]


def patch_torch_xla() -> None:
    """Patch torch_xla so that threads, Dynamo and autocast can use XLA tensors. Only on 2.9; import torch_xla first."""
    if earlier_version() is not None:
        return
    from kp_dynamo.compat import autocast_attention, lock, scan_gru, symbolic_layer_norm

    autocast_attention.install()
    symbolic_layer_norm.install()
    scan_gru.install()
    lock.install()


def refuse_fork() -> None:
    """Raise if this process lost the XLA client in a fork.

    Raises:
        TPUDeviceError: This process was forked after kp_dynamo had imported torch_xla.
    """
    if forked:
        raise TPUDeviceError(
            "this process was forked after kp_dynamo had imported torch_xla, and a fork does not copy the threads of "
            'its client. Try: start workers with multiprocessing.get_context("spawn"), or fork before the first '
            "compiled call and before kp_dynamo.enable_disk_cache."
        )
