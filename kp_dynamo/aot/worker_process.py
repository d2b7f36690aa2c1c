"""One process that runs the TPU compiler, and the thread that passes programs to it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from kp_dynamo.exceptions import TPUNotAvailableError

INSTALL_V7 = (
    "v7 needs a newer libtpu in an environment of its own: `make aot-v7` in a clone builds it, or set KP_TPU_V7_PYTHON "
    'to the Python of an environment with "jax==0.10.2" and "libtpu==0.0.51".'
)
KernelParts = tuple[str, int]
"""How the operands [1, batch x heads, ...] of Pallas kernels are divided: the sharding of [batch, heads, ...] in XLA's
notation, the batch, and among how many chips the batch and the heads are divided."""

_WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Job:
    """A program to compile.

    Attributes:
        stablehlo: The file of the program.
        hlo: The file for the scheduled program.
        donated: Indices of the donated parameters.
        arguments: The sharding of each argument, in XLA's notation; () for one chip.
        results: The sharding of each result.
        kernels: How Pallas kernels are divided.
        answer: The figures that `worker.py` answers with, or {"failed": reason}.
    """

    stablehlo: Path
    hlo: Path
    donated: tuple[int, ...]
    arguments: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    kernels: KernelParts = ("", 1)
    answer: Future[dict[str, Any]] = field(default_factory=Future)


class WorkerProcess:
    """A process that takes programs from a queue and compiles them, one at a time.

    Args:
        python: The interpreter.
        target: The chip's generation; for a slice, with its shape: ("v5e", "4x4").
        folder: A new folder for its files.
        jobs: The queue; None ends the work.
    """

    def __init__(self, python: str, target: tuple[str, ...], folder: Path, jobs: SimpleQueue[Job | None]) -> None:
        folder.mkdir()
        self.started: Future[dict[str, Any]] = Future()
        self._jobs = jobs
        self._stderr = (folder / "stderr").open("w+")
        environment = _environment(str(folder))
        if python != sys.executable:
            # torch_xla sets it to the libtpu of this environment, which jax would load instead of its own.
            environment.pop("TPU_LIBRARY_PATH", None)
        self._process = subprocess.Popen(
            [python, "-P", str(_WORKER), *target],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, text=True, bufsize=1,
            env=environment,
        )  # fmt: skip
        # A thread waits for the answers, because a read has no timeout.
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """Kill the process and remove its pipes. The queue must hold a None for its thread."""
        self._process.kill()
        self._process.wait()
        self._thread.join()
        for pipe in (_pipe(self._process.stdin), _pipe(self._process.stdout), self._stderr):
            with contextlib.suppress(BrokenPipeError):  # unsent requests
                pipe.close()

    def _serve(self) -> None:
        self.started.set_result(ready := self._answer())
        if "failed" in ready:
            return  # and leave the programs to other workers
        while (job := self._jobs.get()) is not None:
            request = {"stablehlo": str(job.stablehlo), "hlo": str(job.hlo), "donated": job.donated}
            request |= {"arguments": job.arguments, "results": job.results, "kernels": job.kernels}
            with contextlib.suppress(BrokenPipeError):  # the answer says why
                _pipe(self._process.stdin).write(json.dumps(request) + "\n")
            job.answer.set_result(self._answer())

    def _answer(self) -> dict[str, Any]:
        line = _pipe(self._process.stdout).readline()
        answer: dict[str, Any] = json.loads(line) if line else {"failed": f"it exited: {self._last_stderr_line()}"}
        return answer

    def _last_stderr_line(self) -> str:
        self._stderr.seek(0)
        lines = [line for line in self._stderr.read().splitlines() if line.strip()]
        return lines[-1] if lines else "without a message"


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None, "the worker was started with pipes"
    return pipe


def libtpu_flags() -> str:
    """The flags that the user gives the compiler, in LIBTPU_INIT_ARGS, which a worker inherits."""
    return " ".join(os.environ.get("LIBTPU_INIT_ARGS", "").split())


def python_for(target: str) -> str:
    """The interpreter whose environment has a compiler for the target."""
    if target != "v7":
        return sys.executable
    beside_this_package = Path(__file__).parents[2] / ".venv-v7" / "bin" / "python"
    python = os.environ.get("KP_TPU_V7_PYTHON") or str(beside_this_package)
    if not os.access(python, os.X_OK):
        raise TPUNotAvailableError(f"target='v7' has no compiler at {python}. {INSTALL_V7}")
    return python


def separate_versions(target: str) -> dict[str, str]:
    """The versions of jax and libtpu for a target that has an environment of its own; {} for any other.

    Raises:
        TPUNotAvailableError: The environment lacks one of them.
    """
    python = python_for(target)
    return {} if python == sys.executable else _versions_in(python)


@cache
def _versions_in(python: str) -> dict[str, str]:
    code = "import json, importlib.metadata as m; print(json.dumps({n: m.version(n) for n in ('jax', 'libtpu')}))"
    told = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=False)
    if told.returncode:
        raise TPUNotAvailableError(f"the environment of {python} has no jax or no libtpu. {INSTALL_V7}")
    versions: dict[str, str] = json.loads(told.stdout)
    return versions


def _environment(folder: str) -> dict[str, str]:
    """Environment of a worker: no TPU metadata query, no lock against a second process, no log files."""
    ours = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        # Without it, libtpu 0.0.21 takes a lock file, and a second process cannot start.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": folder,
        "TPU_MIN_LOG_LEVEL": "3",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    # XLA_FLAGS are for XLA:CPU in this process; libtpu aborts on an unknown flag.
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
    return {**kept, **ours}
