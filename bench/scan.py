"""One program with a While loop over the program of a layer: `jax.lax.scan` calls it with slices of stacked weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

Shape = tuple[int, ...]
TPU = ("tpu",)


def scan_layers(layer: bytes, num_layers: int, carried: Shape, shared: Sequence[Shape], *, is_stacked: bool) -> bytes:
    """The StableHLO of a loop over a layer.

    Args:
        layer: The StableHLO of a layer in bfloat16.
        num_layers: The trip count.
        carried: Shape of the activations, a result of the layer and an argument of the next.
        shared: Shapes of the arguments that all layers read; the others are weights and caches.
        is_stacked: Whether weights and caches are given as [N, ...]. Otherwise N tensors are given for each, as a
            PyTorch model has them, and the program stacks them.
    """
    arguments, results = _signature(layer)
    call = _jax_function(layer, arguments, results)
    own = [i for i, shape in enumerate(arguments) if shape != carried and shape not in shared]
    common = [i for i, shape in enumerate(arguments) if shape in shared]

    def run(x: jax.Array, given: list[jax.Array], stacks: list[Any]) -> Any:
        def step(x: jax.Array, slices: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
            values = {**dict(zip(own, slices, strict=True)), **dict(zip(common, given, strict=True))}
            found = call(*(values.get(i, x) for i in range(len(arguments))))
            position = results.index(carried)
            return found[position], [*found[:position], *found[position + 1 :]]

        return jax.lax.scan(step, x, stacks if is_stacked else [jnp.stack(s) for s in stacks])

    def of_layers(shape: Shape) -> Any:
        return _bf16((num_layers, *shape)) if is_stacked else [_bf16(shape)] * num_layers

    given = [_bf16(arguments[i]) for i in common]
    return _exported(run, _bf16(carried), given, [of_layers(arguments[i]) for i in own]).mlir_module_serialized


def _jax_function(program: bytes, arguments: Sequence[Shape], results: Sequence[Shape]) -> Callable[..., Any]:
    """A JAX function that calls a StableHLO program; JAX inserts the program of an exported function as it is."""
    placeholder = _exported(lambda *_: [jnp.zeros(shape, jnp.bfloat16) for shape in results], *map(_bf16, arguments))
    kept = tuple(range(len(arguments)))
    return replace(placeholder, mlir_module_serialized=program, module_kept_var_idx=kept).call


def _exported(function: Callable[..., Any], *arguments: Any) -> Any:
    return jax.export.export(jax.jit(function), platforms=TPU)(*arguments)


def _bf16(shape: Shape) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _signature(program: bytes) -> tuple[list[Shape], list[Shape]]:
    """Shapes of the arguments and results of `main`."""
    context = mlir.make_ir_context()
    module = stablehlo.deserialize_portable_artifact(context, program)
    [main] = [op for op in module.body.operations if op.attributes["sym_name"].value == "main"]
    types = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    return _shapes(types.inputs), _shapes(types.results)


def _shapes(types: Sequence[Any]) -> list[Shape]:
    tensors = [ir.RankedTensorType(t) for t in types]
    assert all(str(t.element_type) == "bf16" for t in tensors), "a layer in bfloat16"
    return [tuple(t.shape) for t in tensors]
