"""The settings and patches of torch 2.9 under which AOTAutograd traces a graph, and the metadata that it then shows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._functorch import aot_autograd
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextlib.contextmanager
def tracing_settings() -> Iterator[None]:
    """Context in which AOTAutograd traces a graph and compiles its parts."""
    with (
        _backward_with_forward(),
        _metadata_before_partition(),
        # The math form is differentiated op by op; the CPU's fused kernels cannot be lowered to XLA.
        sdpa_kernel(SDPBackend.MATH),
        _without_mkldnn(),
    ):
        yield


def _backward_with_forward() -> contextlib.AbstractContextManager[Any]:
    """Compile the backward with the forward: under Dynamo's lock, so that its errors appear at compile time.

    torch 2.9 has the option, but only its export path sets it. If the first backward call compiled it, two threads
    that train concurrently would fail in torch's own metrics.
    """
    prepare = partial(aot_autograd.prepare_aot_module_simplified, force_non_lazy_backward_lowering=True)
    return mock.patch.object(aot_autograd, "prepare_aot_module_simplified", prepare)


def _metadata_before_partition() -> contextlib.AbstractContextManager[Any]:
    """Make the metadata of a joint graph available to `traced_metadata`; torch 2.9 sets it after partitioning."""
    compile_stage = aot_autograd.aot_stage2_compile  # type: ignore[attr-defined]

    def noted(state: Any, capture: Any) -> Any:
        if (context := torch._guards.TracingContext.try_get()) is not None:
            context.fw_metadata = state.fw_metadata
        return compile_stage(state, capture)

    return mock.patch.object(aot_autograd, "aot_stage2_compile", noted)


@contextlib.contextmanager
def _without_mkldnn() -> Iterator[None]:
    # Like `torch.backends.mkldnn.flags`, which also warns about settings for Intel GPUs (torch 2.9).
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def traced_metadata() -> Any:
    """AOTAutograd's metadata of the graph it is tracing: its mutated inputs and the aliases among its results."""
    context = torch._guards.TracingContext.try_get()
    return context.fw_metadata if context is not None else None


def keep_inputs_attached(joint: fx.GraphModule, num_forward: int) -> None:
    """Keep AOTAutograd from detaching inputs if the graph computes no gradient at all.

    It detaches inputs without a gradient that are results of operators. Detached from all of them, results would not
    require a gradient, as eager's do behind an `autograd.Function` whose backward returns None.
    """
    gradients: Any = joint.graph.output_node().args[0][num_forward:]  # type: ignore[index]
    if (metadata := traced_metadata()) is None or any(isinstance(gradient, fx.Node) for gradient in gradients):
        return
    for i, info in enumerate(metadata.input_info):
        if info.requires_grad and not (info.mutates_data or info.mutates_metadata):
            metadata.input_info[i] = replace(info, is_leaf=True)  # AOTAutograd only reads it where an input is written


def disable_backward_donation() -> None:
    """Make AOTAutograd donate no saved tensor to the backward: otherwise torch forbids retain_graph=True."""
    if (metadata := traced_metadata()) is not None:
        metadata.bw_donated_idxs = []


def overwritten_inputs() -> tuple[int | None, ...]:
    """The inputs that AOTAutograd overwrites with the first results; None for a result it handles differently."""
    meta = traced_metadata()
    if meta is None:
        return ()
    infos = ((i, meta.input_info[i]) for i in meta.mutated_inp_runtime_indices)
    return tuple(
        i if info.mutates_data and not info.mutates_metadata and not info.mutates_storage_metadata else None
        for i, info in infos
    )
