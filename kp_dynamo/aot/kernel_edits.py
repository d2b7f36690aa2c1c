"""Division of Pallas kernels, which XLA cannot divide, among the devices of a slice.

Each kernel works on the part of its operands that a device has, between the custom calls by which XLA turns a whole
array into the part of a device and back. `worker.py` loads this file, in an environment that may have no torch and no
package.
"""

from __future__ import annotations

from typing import Any


def divide_kernels(kernels: list[Any], sharding: str, count: int) -> None:
    """Divide kernels whose operands are [1, heads of all sequences, ...]. The kernel is that of one chip already.

    Args:
        kernels: The custom calls.
        sharding: How the operands lie, in XLA's notation.
        count: Among how many chips.
    """
    from jaxlib.mlir import ir

    if count == 1:
        return
    parts = _Parts(sharding, count)
    for kernel in kernels:
        with kernel.context, kernel.location, ir.InsertionPoint(kernel):
            operands = [parts.of(operand) for operand in kernel.operands]
            attributes = {name: kernel.attributes[name] for name in _names(kernel.attributes)}
            types = [parts.type_of(result.type) for result in kernel.results]
            own = ir.Operation.create(kernel.name, types, operands, attributes).results[0]
            for whole, part in _results(kernel.results[0], own):
                whole.replace_all_uses_with(parts.joined(part, whole.type))


def _names(attributes: Any) -> list[str]:
    """The names of the attributes of an operation, over which jaxlib 0.10 iterates, and 0.7 over names with values."""
    return [found if isinstance(found, str) else found.name for found in attributes]


def _results(whole: Any, own: Any) -> list[tuple[Any, Any]]:
    """Each result of a kernel, with that of the kernel that takes its place. Several results are a tuple."""
    from jaxlib.mlir import ir

    if not isinstance(whole.type, ir.TupleType):
        return [(whole, own)]
    readers = [use.owner for use in whole.uses]
    types = ir.TupleType(own.type)
    pairs = []
    for reader in readers:
        number = reader.attributes["index"]
        kind = types.get_type(ir.IntegerAttr(number).value)
        part = ir.Operation.create("stablehlo.get_tuple_element", [kind], [own], {"index": number}).results[0]
        pairs.append((reader.results[0], part))
    return pairs


class _Parts:
    """The parts of arrays [1, heads of all sequences, ...] that the chips have."""

    def __init__(self, sharding: str, count: int) -> None:
        self._sharding, self._count = sharding, count

    def of(self, whole: Any) -> Any:
        """The part of a chip."""
        placed = _custom_call("Sharding", self._sharding, whole, whole.type)
        return _custom_call("SPMDFullToShardShape", "{manual}", placed, self.type_of(whole.type))

    def joined(self, part: Any, whole: Any) -> Any:
        """An array of the type `whole`, of which each chip has a part."""
        manual = _custom_call("Sharding", "{manual}", part, part.type)
        return _custom_call("SPMDShardToFullShape", self._sharding, manual, whole)

    def type_of(self, whole: Any) -> Any:
        """The type of the part of a chip; of several results, a tuple."""
        from jaxlib.mlir import ir

        if isinstance(whole, ir.TupleType):
            types = ir.TupleType(whole)
            return ir.TupleType.get_tuple([self.type_of(types.get_type(i)) for i in range(types.num_types)])
        one, number, *rest = ir.RankedTensorType(whole).shape
        return _with_shape(whole, [one, number // self._count, *rest])


def _with_shape(like: Any, shape: list[int]) -> Any:
    from jaxlib.mlir import ir

    return ir.RankedTensorType.get(shape, ir.RankedTensorType(like).element_type)


def _custom_call(target: str, sharding: str, operand: Any, result: Any) -> Any:
    from jaxlib.mlir import ir

    attributes: dict[str, Any] = {
        "call_target_name": ir.StringAttr.get(target),
        "mhlo.sharding": ir.StringAttr.get(sharding),
    }
    return ir.Operation.create("stablehlo.custom_call", [result], [operand], attributes).results[0]
