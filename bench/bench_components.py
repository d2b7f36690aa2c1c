"""Benchmarks of the seven components of the object API, compared with the figures of an earlier report.

That report (a TPU v5e-1 under torch_xla 2.5 and 2.9) gives 0.00 ms for compiling, because nothing was compiled. Here
every figure is the median of repetitions on new objects, each repetition waits for the device, and a compilation counts
only if the backend's counter of XLA programs increased. The machines differ: compare the work done, not the speed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

import kp_dynamo
from bench import report
from kp_dynamo.compat import xla
from kp_dynamo.telemetry import snapshot

NUM_QUICK, NUM_COMPILES = 20, 3
BATCH, WIDTH = 32, 256


@dataclass(frozen=True)
class Case:
    """One operation of a component.

    Attributes:
        component: One of the seven.
        what: Description of the operation.
        reported_ms: The report's figure, or None.
        prepare: Creates new objects, untimed, and returns the function to time.
        repetitions: Number of repetitions.
        compiles: Whether it must compile XLA programs; otherwise it must compile none.
    """

    component: str
    what: str
    reported_ms: float | None
    prepare: Callable[[], Callable[[], object]]
    repetitions: int = NUM_QUICK
    compiles: bool = False


def model() -> nn.Module:
    """An MLP of new sizes at each call, so that no earlier program can be reused."""
    _sizes[0] += 8
    return nn.Sequential(nn.Linear(WIDTH, _sizes[0]), nn.GELU(), nn.Linear(_sizes[0], 10)).eval()


_sizes = [WIDTH]


def inputs() -> torch.Tensor:
    return torch.randn(BATCH, WIDTH)


def done() -> None:
    """Wait for the device."""
    torch.ones(1, device=xla.device()).cpu()


def cases() -> Iterator[Case]:
    yield from configuration_cases()
    yield from backend_cases()
    yield from optimizer_cases()
    yield from compiler_cases()
    yield from memory_cases()
    yield from integration_cases()
    yield from validation_cases()


def configuration_cases() -> Iterator[Case]:
    config = kp_dynamo.KernelPyTorchConfig

    def round_trip() -> object:
        return config.from_dict(json.loads(json.dumps(config(mode="training").to_dict())))

    yield Case("configuration", "create", 0.13, lambda: config)
    yield Case("configuration", "to JSON and back", 1.31, lambda: round_trip)


def backend_cases() -> Iterator[Case]:
    def prepare_model() -> Callable[[], object]:
        backend, mine = kp_dynamo.TPUBackend(kp_dynamo.KernelPyTorchConfig()), model()
        return lambda: (backend.prepare_model(mine), backend.synchronize())

    def prepare_data() -> Callable[[], object]:
        backend, batch = kp_dynamo.TPUBackend(kp_dynamo.KernelPyTorchConfig()), {"x": inputs(), "y": [inputs()]}
        return lambda: (backend.prepare_data(batch), backend.synchronize())

    def synchronize() -> Callable[[], object]:
        backend = kp_dynamo.TPUBackend(kp_dynamo.KernelPyTorchConfig())
        return backend.synchronize

    yield Case("backend", "move a model to the device", 0.88, prepare_model)
    yield Case("backend", "move a batch to the device", 0.00, prepare_data)
    yield Case("backend", "synchronize, nothing pending", 0.07, synchronize)


def optimizer_cases() -> Iterator[Case]:
    def optimize(how: str) -> Callable[[], Callable[[], object]]:
        def prepare() -> Callable[[], object]:
            optimizer, mine, x = kp_dynamo.TPUOptimizer(kp_dynamo.KernelPyTorchConfig()), model(), inputs()
            return lambda: getattr(optimizer, f"optimize_for_{how}")(mine, x)

        return prepare

    yield Case("optimizer", "optimize for inference", 0.23, optimize("inference"), NUM_COMPILES, compiles=True)
    yield Case("optimizer", "optimize for training", 0.15, optimize("training"), NUM_COMPILES, compiles=True)


def compiler_cases() -> Iterator[Case]:
    def compile_new() -> Callable[[], object]:
        compiler, mine, x = kp_dynamo.XLACompiler(kp_dynamo.TPUConfig()), model(), inputs()
        return lambda: compiler.compile_model(mine, x)

    def compile_again() -> Callable[[], object]:
        compiler, mine, x = kp_dynamo.XLACompiler(kp_dynamo.TPUConfig()), model(), inputs()
        compiler.compile_model(mine, x)
        return lambda: compiler.compile_model(mine, x)

    yield Case("compiler", "compile a model", 0.00, compile_new, NUM_COMPILES, compiles=True)
    yield Case("compiler", "compile it again: the cache", 0.00, compile_again, NUM_COMPILES)


def memory_cases() -> Iterator[Case]:
    def manager() -> kp_dynamo.TPUMemoryManager:
        return kp_dynamo.TPUMemoryManager(kp_dynamo.TPUConfig())

    def allocate() -> Callable[[], object]:
        mine = manager()
        return lambda: (mine.allocate_tensor((1000, 1000)), done())

    def lay_out() -> Callable[[], object]:
        mine, tensor = manager(), torch.randn(1000, 1000).to(xla.device())
        return lambda: mine.optimize_tensor_layout(tensor).cpu()

    def lend() -> Callable[[], object]:
        mine = manager()
        pool = mine.create_memory_pool(2, (512, 512))
        mine.return_tensor_to_pool(pool, mine.get_tensor_from_pool(pool))
        return lambda: mine.return_tensor_to_pool(pool, mine.get_tensor_from_pool(pool))

    def create_pool() -> Callable[[], object]:
        mine = manager()
        return lambda: mine.create_memory_pool(10, (512, 512))

    yield Case("memory manager", "allocate 4 MB", 0.55, allocate)
    yield Case("memory manager", "pad 1000 x 1000 to the tiles", 0.00, lay_out)
    yield Case("memory manager", "create a pool", 0.02, create_pool)
    yield Case("memory manager", "take from a pool and return", None, lend)


def integration_cases() -> Iterator[Case]:
    def all_reduce() -> Callable[[], object]:
        _, distributed, _ = kp_dynamo.create_xla_integration(kp_dynamo.TPUConfig())
        tensor = torch.ones(1000, device=xla.device())
        return lambda: distributed.all_reduce(tensor).cpu()

    yield Case("integration", "create all three", 0.98, lambda: lambda: kp_dynamo.create_xla_integration(_tpu()))
    yield Case("integration", "all_reduce, world of one", None, all_reduce)


def _tpu() -> Any:
    return kp_dynamo.TPUConfig()


def validation_cases() -> Iterator[Case]:
    def validate_model() -> Callable[[], object]:
        mine, x = model(), inputs()
        return lambda: kp_dynamo.validate_tpu_model(mine, kp_dynamo.TPUConfig(), x)

    config = kp_dynamo.KernelPyTorchConfig()
    yield Case("validation", "a configuration", 0.14, lambda: lambda: kp_dynamo.validate_tpu_configuration(config))
    yield Case("validation", "a model and its inputs", 2.41, validate_model)


def measured(case: Case) -> dict[str, Any]:
    """One row: median milliseconds and the XLA programs of one repetition.

    Raises:
        RuntimeError: A case that should compile did not, or vice versa, so the figure would be meaningless.
    """
    torch._dynamo.reset()
    case.prepare()()  # imports, and programs that every later run shares
    taken, programs = [], []
    for _ in range(case.repetitions):
        run = case.prepare()
        done()
        before, start = snapshot()["programs"], time.perf_counter()
        run()
        taken.append((time.perf_counter() - start) * 1e3)
        programs.append(snapshot()["programs"] - before)
    if case.compiles != all(programs) or case.compiles != any(programs):
        raise RuntimeError(f"{case.component}, {case.what}: programs by repetition {programs}")
    return {
        "component": case.component,
        "what": case.what,
        "ms": median(taken),
        "programs": programs[-1],
        "report ms": "" if case.reported_ms is None else f"{case.reported_ms:.2f}",
    }


def main() -> None:
    done()  # the client starts here
    rows = [measured(case) for case in cases()]
    title = f"The components of the object API (medians of {NUM_QUICK}; of {NUM_COMPILES} where programs are compiled)"
    report.publish(report.Report("components", title, rows))


if __name__ == "__main__":
    main()
