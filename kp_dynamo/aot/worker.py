"""A worker process that compiles StableHLO with libtpu. It imports only jax and the standard library.

It can therefore run in an environment without torch and this package (a newer libtpu for a newer chip). A separate
process also keeps libtpu's output off the user's terminal, and can be killed.

`python worker.py TARGET` writes one line of JSON per message to its standard output: first {"ready": ...}, then one
answer for each line {"stablehlo": PATH, "hlo": PATH, "donated": [PARAMETER, ...]} that it reads. It exits as soon as
its standard input ends, also in the middle of a compile: then the process that asked has died.
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

# JAX's name for the smallest topology of each generation.
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
        compiler = _Compiler(sys.argv[1])
    except Exception as problem:  # noqa: BLE001  # report any failure to the parent
        answer({"failed": f"{type(problem).__name__}: {problem}"})
        return
    answer({"ready": compiler.versions, "seconds": time.perf_counter() - start})
    for request in _requests():
        try:
            answer(compiler.compiled(request["stablehlo"], request["hlo"], request["donated"]))
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
    """The TPU compiler for one chip of a generation."""

    def __init__(self, target: str) -> None:
        import jax
        import jaxlib
        from jax._src import compiler
        from jax._src.lib import xla_client
        from jax.experimental import topologies

        # (1, 1, 1) chips per host; v7's smallest topology is one host of four chips, of which a program uses one.
        hosts = {} if target == "v7" else {"chips_per_host_bounds": [1, 1, 1]}
        topology = topologies.get_topology_desc(TOPOLOGIES[target], "tpu", **hosts)
        self._device = topology.devices[0]
        self._devices = xla_client.DeviceList((self._device,))
        self._options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
        self._dumps = self._dump_into(Path(os.environ["TPU_LOG_DIR"]) / "dumps") if target == "v7" else None
        self.versions = {
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "libtpu": _version_of("libtpu"),
            "device": self._device.device_kind,
        }

    def compiled(self, stablehlo: str, hlo: str, donated: list[int]) -> dict[str, Any]:
        """Compile the file `stablehlo` (MLIR bytecode), write the scheduled program to `hlo`, and return its figures.

        The parameters `donated` may be reused for results.
        """
        with open(stablehlo, "rb") as file:
            module = self._read(file.read(), donated)
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

    def _read(self, artifact: bytes, donated: list[int]) -> Any:
        """A portable artifact in the form this JAX accepts: bytes for 0.7, a deserialized module for 0.10."""
        takes_bytes = tuple(int(part) for part in self.versions["jax"].split(".")[:2]) < (0, 8)
        if takes_bytes and not donated:
            return artifact
        from jax._src.interpreters import mlir
        from jaxlib.mlir.dialects import stablehlo

        self._context = mlir.make_ir_context()  # the module needs it alive
        module = stablehlo.deserialize_portable_artifact(self._context, artifact)
        _donate(module, donated)
        return mlir.module_to_bytecode(module) if takes_bytes else module


def _donate(module: Any, parameters: list[int]) -> None:
    """Donate these parameters: XLA may reuse their buffers for any results."""
    from jaxlib.mlir import ir

    [main] = [op for op in module.body.operations if op.attributes["sym_name"].value == "main"]
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
