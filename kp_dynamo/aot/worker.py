"""A worker process that compiles StableHLO with libtpu. It imports only jax and the standard library.

It can therefore run in an environment without torch and this package (a newer libtpu for a newer chip). A separate
process also keeps libtpu's output off the user's terminal, and can be killed.

`python worker.py TARGET [SHAPE]` writes one line of JSON per message to its standard output: first {"ready": ...},
then one answer for each line {"stablehlo": PATH, "hlo": PATH, "donated": [PARAMETER, ...], "arguments": [...],
"results": [...], "kernels": [...]} that it reads. With a SHAPE, such as 4x4, it compiles for all chips of this slice.
`arguments` and `results` are then their shardings in XLA's notation, and `kernels` is how Pallas kernels are divided,
see `_divide_kernels`; for one chip, they are empty. It exits as soon as its standard input ends, also in the middle of
a compile: then the process that asked has died.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# JAX's names for the smallest topology of each generation, and for the generation itself.
TOPOLOGIES = {"v4": "v4:1x1x1", "v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "v7": "tpu7x:2x2x1"}


def main() -> None:
    """Serve until the standard input ends."""
    # libtpu and its child processes also write to the standard output, so redirect that to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    start = time.perf_counter()
    try:
        compiler = _Compiler(*sys.argv[1:])
    except Exception as problem:  # noqa: BLE001  # report any failure to the parent
        answer({"failed": f"{type(problem).__name__}: {problem}"})
        return
    answer({"ready": compiler.versions, "seconds": time.perf_counter() - start})
    for request in _requests():
        try:
            answer(compiler.compiled(**request))
        except Exception as problem:  # noqa: BLE001
            answer({"failed": str(problem)})


def _requests() -> Iterator[dict[str, Any]]:
    """The requests, read by a thread that exits the process when they end."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield json.loads(lines.get())


class _Compiler:
    """The TPU compiler for one chip of a generation, or for all chips of a slice."""

    def __init__(self, target: str, shape: str = "") -> None:
        import jax
        import jaxlib
        from jax._src import compiler
        from jax._src.lib import xla_client

        devices = _chips_of_slice(target, shape) if shape else _one_chip(target)
        self._device, self._num_chips = devices[0], len(devices)
        self._devices = xla_client.DeviceList(tuple(devices))
        self._options = compiler.get_compile_options(
            num_replicas=1,
            num_partitions=len(devices),
            device_assignment=[[device.id for device in devices]] if shape else None,
        )
        if shape:
            self._options.executable_build_options.use_shardy_partitioner = False  # the attributes are GSPMD's
        self._dumps = self._dump_into(Path(os.environ["TPU_LOG_DIR"]) / "dumps") if target == "v7" else None
        self.versions = {
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "libtpu": _version_of("libtpu"),
            "device": self._device.device_kind,
        }

    def compiled(
        self,
        stablehlo: str,
        hlo: str,
        donated: list[int],
        arguments: list[str],
        results: list[str],
        kernels: tuple[str, int, int, int],
    ) -> dict[str, Any]:
        """Compile the file `stablehlo` (MLIR bytecode), write the scheduled program to `hlo`, and return its figures.

        The parameters `donated` may be reused for results. The figures are those of one chip.
        """
        with open(stablehlo, "rb") as file:
            module = self._read(file.read(), donated, arguments, results, kernels)
        start = time.process_time()  # wall time would depend on the other workers
        executable = self._device.client.compile(module, self._devices, self._options)
        seconds = time.process_time() - start
        with open(hlo, "w") as file:
            file.write(self._scheduled(executable))
        cost = executable.cost_analysis()
        cost = cost[0] if isinstance(cost, list) else cost
        memory = executable.get_compiled_memory_stats()
        names = ("argument", "output", "temp", "alias", "generated_code")
        sizes = {f"{name}_bytes": getattr(memory, f"{name}_size_in_bytes") for name in names}
        # The cost analysis omits zero entries.
        flops, moved = cost.get("flops", 0.0), cost.get("bytes accessed", 0.0)
        return {"seconds": seconds, "flops": flops, "bytes": moved, **sizes}

    def _scheduled(self, executable: Any) -> str:
        """The scheduled program as text."""
        if self._dumps is None:
            return str(executable.hlo_modules()[0].to_string())
        # jaxlib 0.10.2 cannot parse every program of libtpu 0.0.51, so libtpu dumps the text itself.
        [found] = self._dumps.glob("*IrToHlo*.after_codegen.txt")
        text = found.read_text()
        for file in self._dumps.glob("*"):
            if file.is_file():
                file.unlink()
        return text

    def _dump_into(self, folder: Path) -> Path:
        settings = self._options.executable_build_options.debug_options
        settings.xla_dump_to, settings.xla_dump_hlo_as_text = str(folder), True
        return folder

    def _read(
        self,
        artifact: bytes,
        donated: list[int],
        arguments: list[str],
        results: list[str],
        kernels: tuple[str, int, int, int],
    ) -> Any:
        """A portable artifact in the form this JAX accepts: bytes for 0.7, a deserialized module for 0.10."""
        takes_bytes = tuple(int(part) for part in self.versions["jax"].split(".")[:2]) < (0, 8)
        if takes_bytes and not donated and self._num_chips == 1:
            return artifact
        from jax._src.interpreters import mlir
        from jaxlib.mlir.dialects import stablehlo

        self._context = mlir.make_ir_context()  # the module needs it alive
        module = stablehlo.deserialize_portable_artifact(self._context, artifact)
        if self._num_chips > 1:
            _shard(module, self._num_chips, arguments, results)
            _divide_kernels(module, *kernels)
            _gather(module)
        _donate(module, donated)
        return mlir.module_to_bytecode(module) if takes_bytes else module


def _one_chip(target: str) -> list[Any]:
    from jax.experimental import topologies

    # (1, 1, 1) chips per host; v7's smallest topology is one host of four chips, of which a program uses one.
    hosts = {} if target == "v7" else {"chips_per_host_bounds": [1, 1, 1]}
    return [topologies.get_topology_desc(TOPOLOGIES[target], "tpu", **hosts).devices[0]]


def _chips_of_slice(target: str, shape: str) -> list[Any]:
    """The chips of a slice in row-major order of its grid, which is how the caller numbers them."""
    from jax.experimental import topologies

    name = f"{TOPOLOGIES[target].partition(':')[0]}:{shape}"
    # By default, libtpu 0.0.21 has a device for each of the two cores of a v4; "megacore" joins them, as on Cloud TPU.
    cores = {"chip_config_name": "megacore"} if target in ("v4", "v5p") else {}
    devices = sorted(topologies.get_topology_desc(name, "tpu", **cores).devices, key=lambda d: tuple(d.coords))
    num_chips = len({tuple(device.coords) for device in devices})
    if num_chips != len(devices):
        raise ValueError(f"{name} has {len(devices)} devices on {num_chips} chips")
    return devices


def _shard(module: Any, num_chips: int, arguments: list[str], results: list[str]) -> None:
    """Give each argument and result its sharding. XLA would replicate a result without one."""
    from jaxlib.mlir import ir

    main = _main(module)
    num_results = len(ir.FunctionType(main.attributes["function_type"].value).results)
    if (len(main.arguments), num_results) != (len(arguments), len(results)):
        given, expected = f"{len(arguments)} and {len(results)}", f"{len(main.arguments)} and {num_results}"
        raise ValueError(f"the numbers of shardings for arguments and results are {given}, expected {expected}")
    with module.context:
        for name, shardings in (("arg_attrs", arguments), ("res_attrs", results)):
            attributes = [ir.DictAttr.get({"mhlo.sharding": ir.StringAttr.get(text)}) for text in shardings]
            main.attributes[name] = ir.ArrayAttr.get(attributes)
        number = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), num_chips)
        module.operation.attributes["mhlo.num_partitions"] = number


def _divide_kernels(module: Any, sharding: str, batch: int, rows: int, columns: int) -> None:
    """Make each Pallas kernel, which XLA cannot divide, work on the part of its operands that a chip has.

    Their dimension 1 is the batch x heads: `rows` chips have a part of the batch each, and `columns` a part of the
    heads. The kernel itself is that of one chip already.
    """
    from jaxlib.mlir import ir

    if rows * columns == 1:
        return
    parts = _Parts(sharding, batch, rows, columns)
    kernels = [op.operation for op in _main(module).entry_block.operations if _is_call(op, "tpu_custom_call")]
    for kernel in kernels:
        with module.context, kernel.location, ir.InsertionPoint(kernel):
            operands = [parts.of(operand) for operand in kernel.operands]
            attributes = {named.name: named.attr for named in kernel.attributes}
            types = [parts.type_of(result.type) for result in kernel.results]
            own = ir.Operation.create(kernel.name, types, operands, attributes).results[0]
            for whole, part in _results(kernel.results[0], own):
                whole.replace_all_uses_with(parts.joined(part, whole.type))


def _gather(module: Any) -> None:
    """Let each chip have the whole of what `lowering/export.py` marked."""
    from jaxlib.mlir import ir

    for op in _main(module).entry_block.operations:
        if _is_call(op, "kp_gathered"):
            with module.context:
                op.attributes["call_target_name"] = ir.StringAttr.get("Sharding")
                op.attributes["mhlo.sharding"] = ir.StringAttr.get("{replicated}")


def _is_call(op: Any, target: str) -> bool:
    call = op.operation
    return call.name == "stablehlo.custom_call" and bool(call.attributes["call_target_name"].value == target)


def _results(whole: Any, own: Any) -> list[tuple[Any, Any]]:
    """Each result of a kernel, with that of the kernel that takes its place. Several results are a tuple."""
    from jaxlib.mlir import ir

    if not ir.TupleType.isinstance(whole.type):
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

        if ir.TupleType.isinstance(whole):
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


def _main(module: Any) -> Any:
    [main] = [op for op in module.body.operations if op.attributes["sym_name"].value == "main"]
    return main


def _donate(module: Any, parameters: list[int]) -> None:
    """Donate these parameters: XLA may reuse their buffers for any results."""
    from jaxlib.mlir import ir

    main = _main(module)
    given = main.attributes["arg_attrs"] if "arg_attrs" in main.attributes else [{}] * len(main.arguments)
    with module.context:
        attributes = [{named.name: named.attr for named in attrs} if attrs else {} for attrs in given]
        for parameter in parameters:
            attributes[parameter]["jax.buffer_donor"] = ir.BoolAttr.get(True)
        main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in attributes])


def _version_of(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    main()
