"""Edits of a StableHLO module before libtpu compiles it: shardings and donation.

`worker.py` loads this file, in an environment that may have no torch and no package. The module is an MLIR module of
jaxlib's bindings.
"""

from __future__ import annotations

from typing import Any


def shard(module: Any, num_devices: int, arguments: list[str], results: list[str]) -> None:
    """Give each argument and result its sharding. XLA would replicate a result without one."""
    from jaxlib.mlir import ir

    main = main_of(module)
    num_results = len(ir.FunctionType(main.attributes["function_type"].value).results)
    if (len(main.arguments), num_results) != (len(arguments), len(results)):
        given, expected = f"{len(arguments)} and {len(results)}", f"{len(main.arguments)} and {num_results}"
        raise ValueError(f"the numbers of shardings for arguments and results are {given}, expected {expected}")
    with module.context:
        for name, shardings in (("arg_attrs", arguments), ("res_attrs", results)):
            attributes = [ir.DictAttr.get({"mhlo.sharding": ir.StringAttr.get(text)}) for text in shardings]
            main.attributes[name] = ir.ArrayAttr.get(attributes)
        number = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), num_devices)
        module.operation.attributes["mhlo.num_partitions"] = number


def place(module: Any) -> None:
    """Give each value that `lowering/export.py` marked its sharding."""
    from jaxlib.mlir import ir

    for call in calls(module, "kp_sharding"):
        with module.context:
            call.attributes["call_target_name"] = ir.StringAttr.get("Sharding")
            call.attributes["mhlo.sharding"] = ir.StringAttr.get(call.attributes["backend_config"].value)
            call.attributes["backend_config"] = ir.StringAttr.get("")


def calls(module: Any, target: str) -> list[Any]:
    """The custom calls of this target."""
    found = [op.operation for op in main_of(module).entry_block.operations]
    custom = [op for op in found if op.name == "stablehlo.custom_call"]
    return [op for op in custom if op.attributes["call_target_name"].value == target]


def donate(module: Any, parameters: list[int]) -> None:
    """Donate these parameters: XLA may reuse their buffers for any results."""
    from jaxlib.mlir import ir

    main = main_of(module)
    given = main.attributes["arg_attrs"] if "arg_attrs" in main.attributes else [{}] * len(main.arguments)
    with module.context:
        attributes = [{named.name: named.attr for named in attrs} if attrs else {} for attrs in given]
        for parameter in parameters:
            attributes[parameter]["jax.buffer_donor"] = ir.BoolAttr.get(True)
        main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in attributes])


def main_of(module: Any) -> Any:
    """The function that the program runs."""
    [main] = [op for op in module.body.operations if op.attributes["sym_name"].value == "main"]
    return main
