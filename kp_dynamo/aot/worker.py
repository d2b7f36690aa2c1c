"""A worker process that compiles StableHLO with libtpu. It imports jax, the standard library and two files beside it.

It can therefore run in an environment without torch and this package (a newer libtpu for a newer chip). A separate
process also keeps libtpu's output off the user's terminal, and can be killed.

`python worker.py TARGET [SHAPE]` writes one line of JSON per message to its standard output: first {"ready": ...}, then
one answer for each line {"stablehlo": PATH, "hlo": PATH, "donated": [PARAMETER, ...], "arguments": [...], "results":
[...], "kernels": [...]} that it reads. With a SHAPE, such as 4x4, it compiles for all devices of this slice: its chips,
and on v7 the two halves of each. `arguments` and `results` are then their shardings in XLA's notation, and `kernels` is
how Pallas kernels are divided, see `kernel_edits.py`; for one chip, they are empty. It exits as soon as its standard
input ends, also in the middle of a compile: then the process that asked has died.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
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


def _beside(name: str) -> Any:
    """A module of the same folder, which this script may not import as a part of the package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_module_edits, _kernel_edits = _beside("module_edits"), _beside("kernel_edits")


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
        _return_memory()


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


def _return_memory() -> None:
    """Give the compiler's memory back: for a layer of an 8B Llama, 5.2 of 5.6 GB, while another worker compiles on."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class _Compiler:
    """The TPU compiler for one device of a generation, or for all devices of a slice."""

    def __init__(self, target: str, shape: str = "") -> None:
        import jax
        import jaxlib
        from jax._src import compiler
        from jax._src.lib import xla_client

        devices = _devices_of_slice(target, shape) if shape else _one_device(target)
        self._device, self._num_devices = devices[0], len(devices)
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
        kernels: tuple[str, int],
    ) -> dict[str, Any]:
        """Compile the file `stablehlo` (MLIR bytecode), write the scheduled program to `hlo`, and return its figures.

        The parameters `donated` may be reused for results. The figures are those of one device.
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
        sizes["live_bytes"] = memory.peak_memory_in_bytes
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
        kernels: tuple[str, int],
    ) -> Any:
        """A portable artifact in the form this JAX accepts: bytes for 0.7, a deserialized module for 0.10."""
        takes_bytes = tuple(int(part) for part in self.versions["jax"].split(".")[:2]) < (0, 8)
        if takes_bytes and not donated and self._num_devices == 1:
            return artifact
        from jax._src.interpreters import mlir
        from jaxlib.mlir.dialects import stablehlo

        self._context = mlir.make_ir_context()  # the module needs it alive
        module = stablehlo.deserialize_portable_artifact(self._context, artifact)
        if self._num_devices > 1:
            _module_edits.shard(module, self._num_devices, arguments, results)
            _kernel_edits.divide_kernels(_module_edits.calls(module, "tpu_custom_call"), *kernels)
            _module_edits.place(module)
        _module_edits.donate(module, donated)
        return mlir.module_to_bytecode(module) if takes_bytes else module


def _one_device(target: str) -> list[Any]:
    from jax.experimental import topologies

    # (1, 1, 1) chips per host; v7's smallest slice is one host of four chips, of which a program uses half of one.
    hosts = {} if target == "v7" else {"chips_per_host_bounds": [1, 1, 1]}
    return [topologies.get_topology_desc(TOPOLOGIES[target], "tpu", **hosts).devices[0]]


def _devices_of_slice(target: str, shape: str) -> list[Any]:
    """The devices of a slice as the caller numbers them: chips in row-major order of the grid, both halves of a v7."""
    from jax.experimental import topologies

    name = f"{TOPOLOGIES[target].partition(':')[0]}:{shape}"
    # By default, libtpu 0.0.21 has a device for each of the two cores of a v4; "megacore" joins them, as on Cloud TPU.
    cores = {"chip_config_name": "megacore"} if target in ("v4", "v5p") else {}
    found = topologies.get_topology_desc(name, "tpu", **cores).devices
    devices = sorted(found, key=lambda d: (tuple(d.coords), d.core_on_chip))
    num_chips = len({tuple(device.coords) for device in devices})
    if len(devices) != num_chips * (2 if target == "v7" else 1):
        raise ValueError(f"{name} has {len(devices)} devices on {num_chips} chips")
    return devices


def _version_of(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    main()
