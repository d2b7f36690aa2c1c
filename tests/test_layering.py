"""The rooms of the package: who may import what, read from the sources and not from what happens to be loaded."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spine import run_script

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kp_dynamo"

# A room, a file or a folder of the package with all that is in it, stands above all that it may import. From the ground
# up: what a row names is the standard library's, a library, or a room of a row before it.
MAY_IMPORT = {
    "kp_dynamo.exceptions": (),
    "kp_dynamo.hardware": (),
    "kp_dynamo.page": ("jinja2", "matplotlib", "kp_dynamo.exceptions"),
    "kp_dynamo.ops": ("torch",),
    "kp_dynamo.config": ("kp_dynamo.exceptions", "kp_dynamo.hardware"),
    "kp_dynamo.sharding": ("torch", "kp_dynamo.exceptions"),
    "kp_dynamo.telemetry": ("torch", "kp_dynamo.exceptions"),
    "kp_dynamo.compat": ("torch", "torch_xla", "kp_dynamo.exceptions", "kp_dynamo.ops"),
    "kp_dynamo.graph": (
        "torch", "sympy", "kp_dynamo.exceptions", "kp_dynamo.hardware", "kp_dynamo.ops", "kp_dynamo.sharding",
    ),
    "kp_dynamo.disk_cache": ("kp_dynamo.compat", "kp_dynamo.exceptions"),
    "kp_dynamo.cache": ("torch", "kp_dynamo.compat"),
    "kp_dynamo.error_boundary": ("torch", "kp_dynamo.exceptions", "kp_dynamo.graph"),
    "kp_dynamo.passes": ("torch", "sympy", "kp_dynamo.graph", "kp_dynamo.ops"),
    "kp_dynamo.capture": ("torch", "kp_dynamo.cache", "kp_dynamo.compat", "kp_dynamo.exceptions", "kp_dynamo.graph"),
    "kp_dynamo.blocks": (
        "torch", "sympy", "kp_dynamo.cache", "kp_dynamo.capture", "kp_dynamo.compat", "kp_dynamo.exceptions",
        "kp_dynamo.graph", "kp_dynamo.hardware",
    ),
    "kp_dynamo.block_compiler": (
        "torch", "kp_dynamo.blocks", "kp_dynamo.compat", "kp_dynamo.config", "kp_dynamo.exceptions",
    ),
    "kp_dynamo.autograd": ("torch", "kp_dynamo.compat", "kp_dynamo.exceptions", "kp_dynamo.graph", "kp_dynamo.ops"),
    # FX and ATen come in, a callable goes out: nothing of what made the graph.
    "kp_dynamo.lowering": (
        "torch", "torch_xla", "jax", "sympy", "kp_dynamo.compat", "kp_dynamo.exceptions", "kp_dynamo.graph",
        "kp_dynamo.hardware", "kp_dynamo.ops", "kp_dynamo.sharding", "kp_dynamo.telemetry",
    ),
    "kp_dynamo.runtime": (
        "torch", "xxhash", "kp_dynamo.cache", "kp_dynamo.compat", "kp_dynamo.error_boundary", "kp_dynamo.graph",
        "kp_dynamo.lowering", "kp_dynamo.passes", "kp_dynamo.sharding", "kp_dynamo.telemetry",
    ),
    "kp_dynamo.ledger": ("torch", "kp_dynamo.graph", "kp_dynamo.passes"),
    "kp_dynamo.pipeline": (
        "torch", "kp_dynamo.config", "kp_dynamo.exceptions", "kp_dynamo.graph", "kp_dynamo.ledger",
        "kp_dynamo.passes", "kp_dynamo.sharding", "kp_dynamo.telemetry",
    ),
    "kp_dynamo.buckets": (
        "torch", "sympy", "numpy", "matplotlib", "kp_dynamo.autograd", "kp_dynamo.cache", "kp_dynamo.capture",
        "kp_dynamo.exceptions", "kp_dynamo.graph", "kp_dynamo.lowering", "kp_dynamo.passes", "kp_dynamo.telemetry",
    ),
    "kp_dynamo.uncompiled_frames": (
        "torch", "kp_dynamo.compat", "kp_dynamo.config", "kp_dynamo.exceptions", "kp_dynamo.telemetry",
    ),
    "kp_dynamo.session": (
        "torch", "kp_dynamo.autograd", "kp_dynamo.blocks", "kp_dynamo.buckets", "kp_dynamo.cache", "kp_dynamo.capture",
        "kp_dynamo.compat", "kp_dynamo.config", "kp_dynamo.disk_cache", "kp_dynamo.error_boundary",
        "kp_dynamo.exceptions", "kp_dynamo.graph", "kp_dynamo.ledger", "kp_dynamo.lowering", "kp_dynamo.pipeline",
        "kp_dynamo.runtime", "kp_dynamo.telemetry",
        "kp_dynamo.uncompiled_frames",
    ),
    "kp_dynamo.legacy_backend": (
        "torch", "kp_dynamo.capture", "kp_dynamo.compat", "kp_dynamo.config", "kp_dynamo.error_boundary",
        "kp_dynamo.exceptions",
    ),
    "kp_dynamo.backend": (
        "torch", "kp_dynamo.compat", "kp_dynamo.config", "kp_dynamo.disk_cache", "kp_dynamo.graph",
        "kp_dynamo.legacy_backend", "kp_dynamo.session", "kp_dynamo.telemetry", "kp_dynamo.uncompiled_frames",
    ),
    "kp_dynamo.explanation": (
        "kp_dynamo.exceptions",
        "torch", "kp_dynamo.cache", "kp_dynamo.compat", "kp_dynamo.config", "kp_dynamo.disk_cache", "kp_dynamo.graph",
        "kp_dynamo.lowering", "kp_dynamo.page", "kp_dynamo.passes", "kp_dynamo.runtime", "kp_dynamo.session",
        "kp_dynamo.sharding", "kp_dynamo.telemetry",
    ),
    "kp_dynamo.aot": (
        "torch", "jax", "jaxlib", "kp_dynamo.compat", "kp_dynamo.config", "kp_dynamo.exceptions",
        "kp_dynamo.explanation", "kp_dynamo.graph", "kp_dynamo.hardware", "kp_dynamo.lowering",
        "kp_dynamo.page", "kp_dynamo.runtime", "kp_dynamo.session", "kp_dynamo.sharding",
    ),
    "kp_dynamo.planner": (
        "torch", "tqdm", "kp_dynamo.aot", "kp_dynamo.compat", "kp_dynamo.config", "kp_dynamo.exceptions",
        "kp_dynamo.explanation", "kp_dynamo.graph", "kp_dynamo.hardware", "kp_dynamo.page", "kp_dynamo.sharding",
    ),
    "kp_dynamo.api": (
        "torch", "safetensors", "xxhash", "kp_dynamo.aot", "kp_dynamo.backend", "kp_dynamo.cache", "kp_dynamo.compat",
        "kp_dynamo.config", "kp_dynamo.exceptions", "kp_dynamo.explanation", "kp_dynamo.hardware",
        "kp_dynamo.lowering", "kp_dynamo.session", "kp_dynamo.sharding", "kp_dynamo.telemetry",
    ),
    # The documented path of two names of the object API.
    "kp_dynamo.validation": ("kp_dynamo.api",),
    # The libraries that people use with the backend. A module imports its own, and nothing imports the module.
    "kp_dynamo.integrations": (
        "torch", "accelerate", "transformers", "kp_dynamo.buckets", "kp_dynamo.compat", "kp_dynamo.config",
        "kp_dynamo.exceptions", "kp_dynamo.session",
    ),
    "kp_dynamo.cli": (
        "torch", "kp_dynamo.aot", "kp_dynamo.compat", "kp_dynamo.disk_cache", "kp_dynamo.exceptions",
        "kp_dynamo.explanation", "kp_dynamo.pipeline", "kp_dynamo.planner", "kp_dynamo.sharding",
    ),
    "kp_dynamo.__main__": ("kp_dynamo.cli",),
}  # fmt: skip

# What is guarded: the only rooms that may import it.
ONLY_IMPORTED_BY = {
    "torch_xla": ("kp_dynamo.lowering", "kp_dynamo.compat"),
    "jax": ("kp_dynamo.aot", "kp_dynamo.lowering.flash_payloads"),
    "jaxlib": ("kp_dynamo.aot",),
    "libtpu": ("kp_dynamo.aot",),
    "kp_dynamo.passes": ("kp_dynamo.passes", "kp_dynamo.pipeline"),
    "safetensors": ("kp_dynamo.api.checkpoint",),
    "accelerate": ("kp_dynamo.integrations",),
    "passes": (),  # the link at the root is for readers
    "tests": (),
    "bench": (),
    "demo": (),
}

# Exceptions to the guard: the words in which everybody speaks of passes, not the passes.
SHARED_WORDS = ("kp_dynamo.passes.base",)

# The index names everything, for type checkers only; what it loads is tested in test_package.py.
INDEX = "kp_dynamo"

# A pass may not depend on anything but its fields and the graph.
NOT_IN_PASSES = ("os", "sys", "time", "datetime", "random", "logging", "torch._dynamo", "torch._functorch.config")


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imported(source: str) -> Iterator[str]:
    """Dotted names of all imports, those inside functions and `import_module("...")` included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the room; write them out"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node).endswith("import_module"):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def _is_in(name: str, rooms: tuple[str, ...]) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


def _room(module: str) -> str:
    """kp_dynamo.passes of kp_dynamo.passes.padding.rules."""
    return ".".join(module.split(".")[:2])


def _is_allowed(module: str, name: str) -> bool:
    is_guarded = (guard for guard in ONLY_IMPORTED_BY if _is_in(name, (guard,)) and not _is_in(name, SHARED_WORDS))
    if any(not _is_in(module, ONLY_IMPORTED_BY[guard]) for guard in is_guarded):
        return False
    if _is_in(module, ("kp_dynamo.passes",)) and _is_in(name, NOT_IN_PASSES):
        return False
    room = _room(module)
    is_standard = name.partition(".")[0] in sys.stdlib_module_names
    return is_standard or _is_in(name, (room, *MAY_IMPORT[room]))


def _violations(module: str, source: str) -> list[str]:
    return [name for name in _imported(source) if not _is_allowed(module, name)]


SOURCES = {_module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_its_row_allows(room):
    """All of its modules keep to the row, and the row names nothing that none of them imports."""
    modules = {module: path.read_text() for module, path in SOURCES.items() if _room(module) == room}
    assert {module: found for module, source in modules.items() if (found := _violations(module, source))} == {}
    imported = {name for source in modules.values() for name in _imported(source)}
    assert [row for row in MAY_IMPORT[room] if not any(_is_in(name, (row,)) for name in imported)] == []


def test_every_module_is_in_a_room():
    assert {_room(module) for module in SOURCES if module != INDEX} == set(MAY_IMPORT)


def test_a_room_stands_above_all_that_it_imports():
    rooms = list(MAY_IMPORT)
    above = [(room, name) for i, room in enumerate(rooms) for name in MAY_IMPORT[room] if name in rooms[i:]]
    assert above == []


# Users build a configuration, and doctor looks at versions, where torch cannot be imported.
WITHOUT_TORCH = (
    "cache.lru",
    "cli.main",
    "compat.known_limits",
    "compat.versions",
    "config.translation",
    "exceptions",
    "hardware",
)


def test_what_needs_no_torch_imports_none():
    names = ", ".join(f"kp_dynamo.{name}" for name in WITHOUT_TORCH)
    source = f"import {names}, sys; print(sorted({{'torch', 'torch_xla', 'jax'}} & set(sys.modules)))"
    assert run_script(source).strip() == "[]"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kp_dynamo.exceptions", "import torch"),
        ("kp_dynamo.config.options", "from torch import nn"),
        ("kp_dynamo.config.options", "from kp_dynamo.passes.base import GraphPass"),
        ("kp_dynamo.passes.cast_bf16", "def f():\n    import torch_xla"),
        ("kp_dynamo.passes.cast_bf16", "from kp_dynamo.config import options"),
        ("kp_dynamo.passes.cast_bf16", "import os"),
        ("kp_dynamo.passes.cast_bf16", "import torch._dynamo.config"),
        ("kp_dynamo.ops.linear_act", "from kp_dynamo.passes import base"),
        ("kp_dynamo.ops.linear_act", "import torch_xla.core.xla_model as xm"),
        ("kp_dynamo.lowering.openxla", "from kp_dynamo.pipeline import run_pipeline"),
        ("kp_dynamo.session", "from kp_dynamo.passes.cast_bf16 import CastBf16"),
        ("kp_dynamo.session", "import torch_xla"),
        ("kp_dynamo.telemetry.counters", "from kp_dynamo.passes.base import PassReport"),
        ("kp_dynamo.lowering.program", "import jax"),
        ("kp_dynamo.session", "import importlib; importlib.import_module('torch_xla.runtime')"),
        ("kp_dynamo.backend", "import jax.numpy"),
        ("kp_dynamo.pipeline", "from passes.base import GraphPass"),
        ("kp_dynamo.pipeline", "from tests.graphs import graph_text"),
    ],
)
def test_a_wrong_import_is_seen(module, source):
    assert _violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kp_dynamo.cache.lru", "import threading"),
        ("kp_dynamo.passes.cast_bf16", "import torch.fx\nfrom kp_dynamo.ops.linear_act import fits"),
        ("kp_dynamo.pipeline", "from kp_dynamo.passes.cast_bf16 import CastBf16"),
        ("kp_dynamo.runtime.events", "from kp_dynamo.passes.base import PassReport"),
        ("kp_dynamo.lowering.trace", "import torch_xla"),
        ("kp_dynamo.compat.xla", "import torch_xla.runtime"),
    ],
)
def test_a_right_import_is_let_through(module, source):
    assert _violations(module, source) == []


def test_nothing_is_printed_outside_the_command_line():
    # The self-test is a process of its own, whose answers `doctor` reads. `logging_calls` recognizes a model's print.
    command_lines = ("kp_dynamo.cli.main", "kp_dynamo.__main__", "kp_dynamo.cli.self_test")
    command_lines += ("kp_dynamo.compat.logging_calls",)
    printing = [
        f"{module}:{node.lineno}"
        for module, path in SOURCES.items()
        if not _is_in(module, command_lines)
        for node in ast.walk(ast.parse(path.read_text()))
        if _prints(node)
    ]
    assert printing == []


def _prints(node: ast.AST) -> bool:
    """A mention is enough: `map(print, lines)`, `write = sys.stdout.write`, `from sys import stdout`."""
    if isinstance(node, ast.ImportFrom):
        return any(alias.name in ("stdout", "__stdout__") for alias in node.names)
    return isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in ("print", "builtins.print", "sys.stdout")


@pytest.mark.parametrize(
    "source", ["print(1)", "map(print, x)", "sys.stdout.write('a')", "from sys import stdout", "f = builtins.print"]
)
def test_printing_is_seen(source):
    assert any(map(_prints, ast.walk(ast.parse(source))))


@pytest.mark.parametrize("source", ["gm.print_readable(print_output=False)", "logger.info('print')", "fingerprint(x)"])
def test_calls_that_only_resemble_printing_are_allowed(source):
    assert not any(map(_prints, ast.walk(ast.parse(source))))


def test_nothing_imports_the_link_at_the_root():
    sources = [path for folder in ("tests", "bench", "demo") for path in (ROOT / folder).rglob("*.py")]
    assert ROOT / "tests" / "conftest.py" in sources
    assert [p for p in sources for name in _imported(p.read_text()) if _is_in(name, ("passes",))] == []


def test_passes_at_the_root_is_a_link():
    link = ROOT / "passes"
    assert link.is_symlink()
    assert link.readlink() == Path("kp_dynamo/passes")
