"""Client of the TPU compiler: runs it in a worker process and translates its failures to exceptions."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from kp_dynamo.exceptions import (
    TPUBackendError,
    TPUNotAvailableError,
    TPUOutOfMemoryError,
    XLACompilationError,
    XLACompilationTimeoutError,
)
from kp_dynamo.graph.least_memory import REMEDIES

_WORKER = Path(__file__).with_name("worker.py")
_INSTALL = 'Install the TPU compiler with pip install "kp_dynamo[tpu]".'
_INSTALL_V7 = (
    "v7 needs a newer libtpu in an environment of its own: `make aot-v7` in a clone builds it, or set KP_TPU_V7_PYTHON "
    'to the Python of an environment with "jax==0.10.2" and "libtpu==0.0.51".'
)
_NARROWER = (
    ' libtpu 0.0.21 fails on bfloat16 matmuls at precision \'highest\'. Try: options={"matmul_precision": "high"}.'
)
# libtpu's out-of-memory messages, for HBM, VMEM and scalar memory.
_NO_ROOM = re.compile(r"RESOURCE_EXHAUSTED|Ran out of memory|out of memory|exceeds the limit", re.IGNORECASE)


@dataclass(frozen=True)
class Compiled:
    """One program compiled by the TPU compiler. Sizes are padded to the chip's tiles.

    Attributes:
        hlo: The scheduled program, as text.
        seconds: Compile time.
        flops: Floating point operations, as the compiler counts them.
        bytes: Bytes that its operations read and write, in any memory, as the compiler counts them.
        argument_bytes: Size of the arguments.
        output_bytes: Size of the results.
        temp_bytes: Size of the temporaries.
        alias_bytes: Size of the results that reuse donated arguments.
        generated_code_bytes: Size of the program itself.
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


class TpuCompiler:
    """Compiles for one chip of a generation, in a worker process that starts in the background.

    A context manager; exiting it kills the worker.

    Args:
        target: "v4", "v5e", "v5p", "v6e" or "v7".
        deadline: `time.monotonic()` at which compiling is aborted, or None.
    """

    def __init__(self, target: str, deadline: float | None = None) -> None:
        self.target, self._deadline = target, deadline
        self.versions: dict[str, str] = {}
        self._waiting: list[Path] = []
        self._numbers = itertools.count()
        python = _python_for(target)
        self._folder = tempfile.TemporaryDirectory(prefix="kp_tpu_aot_")
        self._stderr = (Path(self._folder.name) / "stderr").open("w+")
        self._process = subprocess.Popen(
            [python, "-P", str(_WORKER), target],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, text=True, bufsize=1,
            env=_environment(self._folder.name),
        )  # fmt: skip
        # A thread reads, because select() does not see lines that Python has buffered, and a read has no timeout.
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(_pipe(self._process.stdout),), daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kill the worker and remove its files."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (_pipe(self._process.stdin), _pipe(self._process.stdout), self._stderr):
            with contextlib.suppress(BrokenPipeError):  # unsent requests
                pipe.close()
        self._folder.cleanup()

    def submit(self, stablehlo: bytes, donated: Sequence[int] = ()) -> None:
        """Submit a program (MLIR bytecode) and the indices of its donated parameters.

        `result` returns the answers in the same order.
        """
        number = next(self._numbers)
        source, target = (Path(self._folder.name) / f"{number}.{kind}" for kind in ("mlir", "hlo"))
        source.write_bytes(stablehlo)
        self._waiting.append(target)
        try:
            request = {"stablehlo": str(source), "hlo": str(target), "donated": list(donated)}
            _pipe(self._process.stdin).write(json.dumps(request) + "\n")
        except BrokenPipeError:
            return  # `result` reports why

    def result(self) -> Compiled:
        """The next compiled program.

        Raises:
            TPUNotAvailableError: No TPU compiler for the target is installed.
            TPUOutOfMemoryError: The program does not fit the chip's memory.
            XLACompilationError: The compiler rejected the program for another reason.
            XLACompilationTimeoutError: The deadline passed first.
        """
        if not self.versions:
            started = self._answer(TPUNotAvailableError)
            self.versions = started["ready"]
        hlo = self._waiting.pop(0)
        figures = self._answer(XLACompilationError)
        compiled = Compiled(hlo=hlo.read_text(), **figures)
        hlo.unlink()
        return compiled

    def _answer(self, kind: type[TPUBackendError]) -> dict[str, Any]:
        line = self._line()
        message: dict[str, Any] = json.loads(line) if line else {"failed": f"it exited: {self._last_stderr_line()}"}
        if "failed" not in message:
            return message
        problem = message["failed"]
        if kind is TPUNotAvailableError:
            advice = _INSTALL_V7 if self.target == "v7" else _INSTALL
            raise TPUNotAvailableError(f"the TPU compiler for target={self.target} cannot start: {problem}. {advice}")
        if _NO_ROOM.search(problem):
            raise TPUOutOfMemoryError(
                f"the program does not fit the memory of a {self.target}. {_short(problem)} {REMEDIES}"
            )
        advice = _NARROWER if "Mosaic failed" in problem and "Bad lhs type" in problem else ""
        raise XLACompilationError(f"the compiler for {self.target} rejected a program: {_short(problem)}{advice}")

    def _read(self, pipe: IO[str]) -> None:
        for line in pipe:
            self._lines.put(line)
        self._lines.put("")

    def _line(self) -> str:
        """The next line that the worker writes, or "" if it has exited."""
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        try:
            return self._lines.get(timeout=left)
        except queue.Empty:
            raise XLACompilationTimeoutError(
                f"compiling for {self.target} exceeded its time limit and was stopped. Try: raise the limit, or "
                "compile a smaller model (fewer layers are enough to compare options)."
            ) from None

    def _last_stderr_line(self) -> str:
        self._stderr.seek(0)
        lines = [line for line in self._stderr.read().splitlines() if line.strip()]
        return lines[-1] if lines else "without a message"


def _short(problem: str) -> str:
    return problem if len(problem) < 1500 else problem[:1500] + " ..."


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None, "the worker was started with pipes"
    return pipe


def _python_for(target: str) -> str:
    """The interpreter whose environment has a compiler for the target."""
    if target != "v7":
        return sys.executable
    beside_this_package = Path(__file__).parents[2] / ".venv-v7" / "bin" / "python"
    python = os.environ.get("KP_TPU_V7_PYTHON") or str(beside_this_package)
    if not os.access(python, os.X_OK):
        raise TPUNotAvailableError(f"target='v7' has no compiler at {python}. {_INSTALL_V7}")
    return python


def _environment(folder: str) -> dict[str, str]:
    """Environment of the worker: no TPU metadata query, no lock against a second process, no log files."""
    ours = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": folder,
        "TPU_MIN_LOG_LEVEL": "3",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    # XLA_FLAGS are for XLA:CPU in this process; libtpu aborts on an unknown flag.
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
    return {**kept, **ours}
