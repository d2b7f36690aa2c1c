"""Division of Pallas kernels, which XLA cannot divide, among the devices of a slice.

Each kernel works on the part of its operands that a device has, between the custom calls by which XLA turns a whole
array into the part of a device and back. `worker.py` loads this file, in an environment that may have no torch and no
package.
"""

from __future__ import annotations

from typing import Any


def divide_kernels(kernels: list[Any], sharding: str, batch: int, rows: int, columns: int) -> None:
    """Divide kernels whose operands are [1, batch x heads, ...]. The kernel itself is that of one chip already.

    Args:
        kernels: The custom calls.
        sharding: How [batch, heads, ...] lies, in XLA's notation.
        batch: The batch of all chips.
        rows: Among how many chips the batch is divided.
        columns: Among how many chips the heads are divided.
    """
    from jaxlib.mlir import ir

    if rows * columns == 1:
        return
    parts = _Parts(sharding, batch, rows, columns)
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
    """The parts of arrays [1, batch x heads, ...] that the chips have."""

    def __init__(self, sharding: str, batch: int, rows: int, columns: int) -> None:
        self._sharding, self._batch, self._rows, self._columns = sharding, batch, rows, columns

    def of(self, whole: Any) -> Any:
        """The part of a chip."""
        by_head = self._by_head(whole.type)
        placed = _custom_call("Sharding", self._sharding, _reshape(whole, by_head), by_head)
        part = _custom_call("SPMDFullToShardShape", "{manual}", placed, self._of_a_chip(by_head))
        return _reshape(part, self.type_of(whole.type))

    def joined(self, part: Any, whole: Any) -> Any:
        """An array of the type `whole`, of which each chip has a part."""
        by_head = self._by_head(whole)
        of_a_chip = _reshape(part, self._of_a_chip(by_head))
        manual = _custom_call("Sharding", "{manual}", of_a_chip, of_a_chip.type)
        return _reshape(_custom_call("SPMDShardToFullShape", self._sharding, manual, by_head), whole)

    def type_of(self, whole: Any) -> Any:
        """The type of the part of a chip; of several results, a tuple."""
        from jaxlib.mlir import ir

        if isinstance(whole, ir.TupleType):
            types = ir.TupleType(whole)
            return ir.TupleType.get_tuple([self.type_of(types.get_type(i)) for i in range(types.num_types)])
        one, number, *rest = ir.RankedTensorType(whole).shape
        return _with_shape(whole, [one, number // self._rows // self._columns, *rest])

    def _by_head(self, whole: Any) -> Any:
        from jaxlib.mlir import ir

        _, number, *rest = ir.RankedTensorType(whole).shape
        return _with_shape(whole, [self._batch, number // self._batch, *rest])

    def _of_a_chip(self, by_head: Any) -> Any:
        from jaxlib.mlir import ir

        batch, heads, *rest = ir.RankedTensorType(by_head).shape
        return _with_shape(by_head, [batch // self._rows, heads // self._columns, *rest])


def _with_shape(like: Any, shape: list[int]) -> Any:
    from jaxlib.mlir import ir

    return ir.RankedTensorType.get(shape, ir.RankedTensorType(like).element_type)


def _reshape(value: Any, result: Any) -> Any:
    from jaxlib.mlir import ir

    return ir.Operation.create("stablehlo.reshape", [result], [value]).results[0]


def _custom_call(target: str, sharding: str, operand: Any, result: Any) -> Any:
    from jaxlib.mlir import ir

    attributes: dict[str, Any] = {
        "call_target_name": ir.StringAttr.get(target),
        "mhlo.sharding": ir.StringAttr.get(sharding),
    }
    return ir.Operation.create("stablehlo.custom_call", [result], [operand], attributes).results[0]
