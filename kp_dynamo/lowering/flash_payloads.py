"""Payloads of flash attention custom calls for the TPU's compiler: JAX's Pallas kernels, lowered without a TPU.

JAX lowers a kernel (to Mosaic, MLIR bytecode) for a named platform. Lowering runs nothing and needs no TPU client.
JAX must not create a TPU client: a TPU accepts one client, and torch_xla holds it. If JAX is not initialized in this
process, this module initializes it on the CPU only, and JAX stays on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kp_dynamo.exceptions import TPUNotAvailableError, XLACompilationError
from kp_dynamo.ops.flash_kernels import FlashKernel

_WORK = {"forward": (2, 2, 2, 0), "train": (2, 2, 2, 2), "keys": (4, 2, 4, 3), "queries": (3, 3, 2, 3)}
"""Matmuls, including recomputed scores; arrays of [S, D], [T, D] and [S, 128] that are read or written."""


_SKIPS_QUERY = "TPU_SKIP_MDS_QUERY"


@functools.lru_cache(maxsize=256)
def payload_of(kernel: FlashKernel) -> str:
    """The configuration of a `tpu_custom_call` that runs the kernel.

    Raises:
        TPUNotAvailableError: JAX is not installed.
        XLACompilationError: The kernel does not support these sizes, or this JAX no longer has it.
    """
    try:
        with _kept_variable():
            import jax
            from jax.experimental.pallas.ops.tpu import flash_attention
    except ImportError as cause:
        raise TPUNotAvailableError(
            f"kp::flash_attention on a TPU is a JAX kernel, but JAX cannot be imported ({cause}). Try: "
            'pip install "kp_dynamo[tpu]", or remove FlashAttention() from extra_passes.'
        ) from cause
    try:
        with _started_on_cpu(jax), jax.default_matmul_precision(kernel.precision):
            config = _lowered(jax, *_call_of(jax, flash_attention, kernel))
    except Exception as cause:
        raise XLACompilationError(
            f"JAX {jax.__version__} cannot lower {kernel}: {type(cause).__name__}: {str(cause).splitlines()[:1]}. "
            "Try: remove FlashAttention() from extra_passes."
        ) from cause
    return _with_cost(config, kernel)


@contextlib.contextmanager
def _kept_variable() -> Iterator[None]:
    """Undo what an import of JAX 0.7 sets if no TPU is attached.

    If it is set, torch_xla 2.9 reads the version of the TPU from a second variable, and raises a TypeError without it.
    Lightning's Trainer asks for the version.
    """
    was_set = _SKIPS_QUERY in os.environ
    yield
    if not was_set:
        os.environ.pop(_SKIPS_QUERY, None)


@contextlib.contextmanager
def _started_on_cpu(jax: Any) -> Iterator[None]:
    """Keep JAX from looking for a TPU when it starts. Does nothing if JAX has started."""
    from jax._src import xla_bridge

    asked = jax.config.jax_platforms
    if xla_bridge.backends_are_initialized():
        yield
        return
    jax.config.update("jax_platforms", "cpu")
    try:
        yield
    finally:
        jax.config.update("jax_platforms", asked)


def _call_of(jax: Any, flash: Any, kernel: FlashKernel) -> tuple[Callable[..., Any], list[Any]]:
    """A function that calls the kernel, and the shapes of its operands."""
    block, scale, causal = kernel.scoring.block, kernel.scoring.scale, kernel.scoring.is_causal
    dtype = {torch.bfloat16: "bfloat16", torch.float32: "float32"}[kernel.dtype]

    def operand(*shape: int, of: str = dtype) -> Any:
        return jax.ShapeDtypeStruct((1, kernel.num_heads, *shape), of)

    q, k = operand(kernel.num_queries, kernel.width), operand(kernel.num_keys, kernel.width)
    if kernel.part in ("forward", "train"):
        rest = None, None, kernel.part == "train", causal, scale, 1, block, block, block, False
        return lambda q, k, v: flash._flash_attention_impl(q, k, v, *rest), [q, k, k]
    blocks = {"block_q_major": block, "block_k_major": block, "block_k": block}
    how = {**blocks, "sm_scale": scale, "causal": causal, "mask_value": flash.DEFAULT_MASK_VALUE, "debug": False}
    backward = flash._flash_attention_bwd_dq
    if kernel.part == "keys":
        backward, how = flash._flash_attention_bwd_dkv, {**how, "block_q": block}
    row = operand(kernel.num_queries, of="float32")
    return lambda q, k, v, *rows: backward(q, k, v, None, None, *rows, **how), [q, k, k, row, row, q, row]


def _lowered(jax: Any, call: Callable[..., Any], operands: list[Any]) -> str:
    """The configuration of the one custom call in `call`."""
    from jax._src.interpreters import mlir

    # Without `for_export`, the program would require the libtpu of this JAX version.
    parameters = mlir.LoweringParameters(for_export=True)
    lowered = jax.jit(call).trace(*operands).lower(lowering_platforms=("tpu",), _private_parameters=parameters)
    [found] = [op for op in _operations(lowered.compiler_ir().operation) if _is_kernel(op)]
    return str(found.attributes["backend_config"].value)


def _operations(op: Any) -> Iterator[Any]:
    for inner in (o.operation for region in op.regions for block in region.blocks for o in block.operations):
        yield inner
        yield from _operations(inner)


def _is_kernel(op: Any) -> bool:
    return op.name == "stablehlo.custom_call" and "tpu_custom_call" in str(op.attributes["call_target_name"])


def _with_cost(config: str, kernel: FlashKernel) -> str:
    """The configuration with the kernel's cost estimate: JAX's also counts what a mask skips, or is missing."""
    content = json.loads(config)
    block = kernel.scoring.block
    across = kernel.num_keys // block
    rows = range(kernel.num_queries // block)
    pairs = sum(min(row + 1, across) if kernel.scoring.is_causal else across for row in rows)
    scores = kernel.num_heads * pairs * block * block
    matmuls, of_queries, of_keys, of_rows = _WORK[kernel.part]
    elements = (of_queries * kernel.num_queries + of_keys * kernel.num_keys) * kernel.width * kernel.dtype.itemsize
    content["custom_call_config"]["cost_estimate"] = {
        "flops": 2 * scores * kernel.width * matmuls,
        "transcendentals": scores,
        "bytes_accessed": kernel.num_heads * (elements + of_rows * kernel.num_queries * 512),
    }
    return json.dumps(content)
