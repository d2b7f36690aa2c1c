"""Client of the TPU compiler: runs it in worker processes and translates its failures to exceptions."""

from __future__ import annotations

import itertools
import os
import re
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from kp_dynamo.aot.worker_process import INSTALL_V7, Job, KernelParts, WorkerProcess, python_for
from kp_dynamo.exceptions import (
    TPUBackendError,
    TPUNotAvailableError,
    TPUOutOfMemoryError,
    XLACompilationError,
    XLACompilationTimeoutError,
)
from kp_dynamo.graph.least_memory import remedies
from kp_dynamo.hardware import CHIPS

_INSTALL = 'Install the TPU compiler with pip install "kp_dynamo[tpu]".'
_NARROWER = (
    ' libtpu 0.0.21 fails on bfloat16 matmuls at precision \'highest\'. Try: options={"matmul_precision": "high"}.'
)
_WORKER_BYTES = 2 * 2**30
"""Free memory without which no further worker starts. A worker took 0.5 GiB for a small GPT, 0.9 for a Llama of 7B."""
# libtpu's out-of-memory messages, for HBM, VMEM and scalar memory.
_NO_ROOM = re.compile(r"RESOURCE_EXHAUSTED|Ran out of memory|out of memory|exceeds the limit", re.IGNORECASE)


@dataclass(frozen=True)
class Compiled:
    """One program compiled by the TPU compiler. Sizes are padded to the chip's tiles.

    Attributes:
        hlo: The scheduled program, as text.
        seconds: CPU seconds of the compiler.
        flops: Floating point operations, as the compiler counts them.
        bytes: Bytes that its operations read and write, in any memory, as the compiler counts them.
        argument_bytes: Size of the arguments.
        output_bytes: Size of the results.
        temp_bytes: Size of the temporaries.
        alias_bytes: Size of the results that reuse donated arguments.
        generated_code_bytes: Size of the program itself.
        live_bytes: The most of arguments, results and temporaries that is live at once; 0 if unknown.
    """

    hlo: str
    seconds: float
    flops: float
    bytes: float
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    generated_code_bytes: int
    live_bytes: int = 0


class TpuCompiler:
    """Compiles for one device of a generation or for a slice, in worker processes that start in the background.

    The first worker starts at once. Another one starts when a program is submitted while all are busy, if this process
    may use another core and memory is free. libtpu itself uses one to two cores for a program.

    A context manager; exiting it kills the workers.

    Args:
        target: "v4", "v5e", "v5p", "v6e" or "v7".
        deadline: `time.monotonic()` at which compiling is aborted, or None.
        checkpoint: The option of the programs, so that no error advises what is on.
        shape: The shape of the slice, such as "4x4"; "" for one device.
    """

    def __init__(
        self, target: str, deadline: float | None = None, checkpoint: str | float = "off", shape: str = ""
    ) -> None:
        self.target, self._deadline, self._checkpoint, self._shape = target, deadline, checkpoint, shape
        self.versions: dict[str, str] = {}
        self._submitted: deque[Job] = deque()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._numbers = itertools.count()
        self._python = python_for(target)
        self._folder = tempfile.TemporaryDirectory(prefix="kp_tpu_aot_")
        self._workers: list[WorkerProcess] = []
        self._start_worker()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers and remove their files."""
        for _ in self._workers:
            self._jobs.put(None)
        for worker in self._workers:
            worker.kill()
        self._folder.cleanup()

    def submit(
        self,
        stablehlo: bytes,
        donated: Sequence[int] = (),
        arguments: Sequence[str] = (),
        results: Sequence[str] = (),
        kernels: KernelParts = ("", 1),
    ) -> None:
        """Submit a program (MLIR bytecode), the indices of its donated parameters, and its shardings for a slice.

        `kernels` is how its Pallas kernels are divided. `result` returns the answers in the same order.
        """
        number, folder = next(self._numbers), Path(self._folder.name)
        files = folder / f"{number}.mlir", folder / f"{number}.hlo"
        job = Job(*files, tuple(donated), tuple(arguments), tuple(results), kernels)
        job.stablehlo.write_bytes(stablehlo)
        self._submitted.append(job)
        self._jobs.put(job)
        unfinished = sum(not job.answer.done() for job in self._submitted)
        if len(self._workers) < min(unfinished, num_cores()) and _free_bytes() > _WORKER_BYTES:
            self._start_worker()

    def result(self) -> Compiled:
        """The next compiled program.

        Raises:
            TPUNotAvailableError: No TPU compiler for the target is installed.
            TPUOutOfMemoryError: The program does not fit the chip's memory.
            XLACompilationError: The compiler rejected the program for another reason.
            XLACompilationTimeoutError: The deadline passed first.
        """
        if not self.versions:
            started = self._answer(self._workers[0].started, TPUNotAvailableError)
            self.versions = started["ready"]
        job = self._submitted.popleft()
        figures = self._answer(job.answer, XLACompilationError)
        compiled = Compiled(hlo=job.hlo.read_text(), **figures)
        job.hlo.unlink()
        return compiled

    def _start_worker(self) -> None:
        folder = Path(self._folder.name) / f"worker{len(self._workers)}"
        target = (self.target, self._shape) if self._shape else (self.target,)
        self._workers.append(WorkerProcess(self._python, target, folder, self._jobs))

    def _answer(self, answer: Future[dict[str, Any]], kind: type[TPUBackendError]) -> dict[str, Any]:
        message = self._within_time(answer)
        if "failed" not in message:
            return message
        problem = message["failed"]
        if kind is TPUNotAvailableError:
            advice = INSTALL_V7 if self.target == "v7" else _INSTALL
            raise TPUNotAvailableError(f"the TPU compiler for target={self.target} cannot start: {problem}. {advice}")
        if _NO_ROOM.search(problem):
            raise TPUOutOfMemoryError(
                f"the program does not fit the memory of {CHIPS[self.target].device_text('a')}. {_short(problem)} "
                f"{remedies(self._checkpoint)}"
            )
        advice = _NARROWER if "Mosaic failed" in problem and "Bad lhs type" in problem else ""
        raise XLACompilationError(f"the compiler for {self.target} rejected a program: {_short(problem)}{advice}")

    def _within_time(self, answer: Future[dict[str, Any]]) -> dict[str, Any]:
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        try:
            return answer.result(timeout=left)
        except TimeoutError:
            raise XLACompilationTimeoutError(
                f"compiling for {self.target} exceeded its time limit and was stopped. Try: raise the limit, or "
                "compile a smaller model (fewer layers are enough to compare options)."
            ) from None


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _free_bytes() -> int:
    """Memory that a new process can take, from Linux, the only system that libtpu runs on."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def _short(problem: str) -> str:
    return problem if len(problem) < 1500 else problem[:1500] + " ..."
