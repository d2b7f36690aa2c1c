"""Build the C files, and run processes that compile through the disk cache."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "kp_dynamo" / "disk_cache" / "native"
HERE = Path(__file__).parent
ENOUGH = 100_000_000


def plugin_folder() -> Path | None:
    """The folder of XLA's CPU plugin, of API 0.81, with its header. None if the package is not installed."""
    found = importlib.util.find_spec("xla_plugins")
    places = list(found.submodule_search_locations or ()) if found else []
    folders = [Path(place) / "xla_cpu_pjrt" for place in places]
    return next((folder for folder in folders if (folder / "xla_cpu_pjrt.so").is_file()), None)


def build(to: Path, *sources: Path, visibility: str = "hidden", **macros: str) -> Path:
    """A shared library of C sources, with the warnings as errors."""
    if shutil.which("cc") is None:
        pytest.fail("these tests build the disk cache's C files, and there is no C compiler. Try: install gcc or clang")
    defined = [f'-D{name}="{value}"' for name, value in macros.items()]
    flags = ["-std=c11", "-shared", "-fPIC", "-O2", f"-fvisibility={visibility}", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["cc", *flags, *defined, f"-I{NATIVE}", "-o", to, *sources, "-ldl"], check=True)
    return to


def build_library(to: Path, **macros: str) -> Path:
    """The library that the package ships."""
    return build(to, *sorted(NATIVE.glob("*.c")), **macros)


class Machine:
    """A folder of programs, and processes that use it."""

    def __init__(self, folder: Path, library: Path, front: Path, plugin: Path):
        self.folder, self.library = folder, library
        self.environment = {
            "KP_TEST_PLUGIN": str(plugin),
            "KP_TPU_CACHE_PLUGIN": str(front),
            "KP_TPU_CACHE_DIR": str(folder),
            "KP_TPU_CACHE_MAX_BYTES": str(ENOUGH),
            "PYTHONPATH": str(ROOT),
        }

    def entries(self) -> list[Path]:
        """Least recently used first."""
        found = []
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # a process renamed it meanwhile
                found.append((path.lstat().st_mtime_ns, path))
        return [path for _, path in sorted(found)]

    def start(self, plans: list[dict], **environment: str) -> subprocess.Popen:
        """A process that compiles `plans`."""
        command = [sys.executable, str(HERE / "driver.py"), str(self.library), json.dumps(plans)]
        inherited = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
        full = {**inherited, **self.environment, **environment}
        return subprocess.Popen(command, env=full, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def compile(self, *numbers: int, **environment: str) -> dict:
        """What the cache did in a process that compiles the programs `numbers`."""
        return self.run([{"program": number} for number in numbers], **environment)

    def run(self, plans: list[dict], **environment: str) -> dict:
        return finish(self.start(plans, **environment))


def start_script(code: str, environment: dict[str, str]) -> subprocess.Popen:
    """A process that runs Python code, without the variables of this process that change a compilation."""
    changing = ("KP_TPU", "PJRT", "TPU_", "XLA")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(changing)}
    full = {**inherited, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=full, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen, timeout_s: float = 300) -> dict:
    """What the process printed last; it must have ended well."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


def misses(result: dict) -> dict[str, int]:
    """The reasons for misses that occurred."""
    reasons = ("absent", "damaged", "unreadable", "not_loaded", "no_key", "dumped")
    return {reason: result[reason] for reason in reasons if result[reason]}
