"""The package as its users get it: the index, the entry point, the wheel."""

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import types
import zipfile
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import kp_dynamo
from kp_dynamo import exceptions

ROOT = Path(__file__).parent.parent
NOT_SOURCES = shutil.ignore_patterns(".*", "build", "dist", "out", "__pycache__", "*.egg-info", "*.so")

COMPILE = """
import torch
model = torch.nn.Linear(4, 4)
x = torch.randn(2, 4)
compiled = torch.compile(model, backend="kp_tpu", options={"precision": "float32"})
torch.testing.assert_close(compiled(x), model(x))
"""


def _run(code: str, python: str = sys.executable, cwd: Path | None = None) -> str:
    """What a fresh process prints; it sees neither this directory nor this process's PYTHONPATH."""
    environment = {**os.environ, "PJRT_DEVICE": "CPU"}
    environment.pop("PYTHONPATH", None)
    cwd = cwd or Path(tempfile.gettempdir())
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment, cwd=cwd)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_every_name_of_the_index_is_there():
    assert [name for name in kp_dynamo.__all__ if not hasattr(kp_dynamo, name)] == []
    assert set(kp_dynamo.__all__) <= set(dir(kp_dynamo))


def test_every_exception_is_in_the_index():
    assert {name for name in vars(exceptions) if name.endswith("Error")} <= set(kp_dynamo.__all__)


def test_type_checkers_see_the_names_that_load_lazily():
    tree = ast.parse((ROOT / "kp_dynamo" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == kp_dynamo._HOME_OF


def test_a_name_keeps_its_meaning_after_its_module_was_imported():
    """A function and a module of one name would take turns."""
    for name, home in kp_dynamo._HOME_OF.items():
        assert home != f"kp_dynamo.{name}"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'kp_dynamo' has no attribute 'kp_gpu'"):
        kp_dynamo.kp_gpu  # noqa: B018 - the look-up is the test


def test_importing_the_package_is_cheap():
    modules = _run("import sys, kp_dynamo; print(*sys.modules)").split()
    assert "kp_dynamo" in modules
    assert not {"torch", "torch_xla", "jax", "numpy"} & set(modules)


def test_importing_every_module_neither_imports_torch_xla_nor_changes_dynamo():
    modules = [p.relative_to(ROOT).with_suffix("") for p in (ROOT / "kp_dynamo").rglob("*.py")]
    names = [".".join(m.parts).removesuffix(".__init__") for m in modules if m.stem != "__main__"]
    # Each imports its library, of which some import torch_xla.
    names = [name for name in names if not name.startswith("kp_dynamo.integrations.")]
    code = f"""
import sys, importlib, torch._dynamo.config as config
before = config.get_config_copy()
for name in {names}: importlib.import_module(name)
print("torch_xla" in sys.modules, config.get_config_copy() == before)
"""
    assert _run(code).split() == ["False", "True"]


def test_the_entry_point_is_the_only_registration():
    """torch registers what it loads from there, and asserts that the name is new."""
    found = metadata.entry_points(group="torch_dynamo_backends", name="kp_tpu")
    assert [entry.value for entry in found] == ["kp_dynamo.backend:kp_tpu"]
    assert "register_backend" not in (ROOT / "kp_dynamo" / "backend.py").read_text()


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(COMPILE, marks=pytest.mark.slow, id="never imported"),
        pytest.param(f"import kp_dynamo\n{COMPILE}", marks=pytest.mark.slow, id="imported before"),
        # Its first line is the case "never imported".
        pytest.param(
            f"{COMPILE}\nimport kp_dynamo\nkp_dynamo.kp_tpu\n{COMPILE}\ntorch._dynamo.reset()\n{COMPILE}",
            id="imported after, twice, reset",
        ),
    ],
)
def test_the_line_of_the_title_works(code):
    _run(code)


def test_the_backend_is_a_plain_function():
    """torch sets attributes on it."""
    assert type(kp_dynamo.kp_tpu) is types.FunctionType


def test_the_version_is_one():
    assert kp_dynamo.__version__ == metadata.version("kp_dynamo")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy with tests, benchmarks and the root link, so that each could ship by mistake."""
    source, out = tmp_path_factory.mktemp("source") / "clone", tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, source, symlinks=True, ignore=NOT_SOURCES)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "kp_dynamo").rglob("*.py")}
    about = f"kp_dynamo-{kp_dynamo.__version__}.dist-info"
    facts = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "kp_dynamo/passes/base.py" in sources
    library = f"disk_cache/_plugin{EXTENSION_SUFFIXES[0]}"
    others = {"py.typed", "page/templates/page.html", "page/templates/style.css", library}
    assert names == sources | {f"kp_dynamo/{name}" for name in others} | {f"{about}/{fact}" for fact in facts}


def test_the_wheel_says_what_it_is(wheel):
    about = f"kp_dynamo-{kp_dynamo.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        entry_points = archive.read(f"{about}/entry_points.txt").decode()
        top_level = archive.read(f"{about}/top_level.txt").decode()
        described = archive.read(f"{about}/METADATA").decode().splitlines()
    assert entry_points.split() == ["[torch_dynamo_backends]", "kp_tpu", "=", "kp_dynamo.backend:kp_tpu"]
    assert top_level == "kp_dynamo\n"
    assert {"Requires-Dist: torch<2.10,>=2.9", "Requires-Dist: torch_xla<2.10,>=2.9"} <= set(described)
    assert {f"Provides-Extra: {extra}" for extra in ("tpu", "test", "bench", "friends")} <= set(described)


@pytest.mark.slow
def test_the_wheel_compiles_in_an_empty_environment(wheel):
    """Not under tmp_path: pytest keeps the last three of those, and this one takes 8 GB."""
    with tempfile.TemporaryDirectory() as folder:
        python = f"{folder}/bin/python"
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), str(wheel)]
        subprocess.run(install, check=True)
        found = _run(f"{COMPILE}\nimport kp_dynamo; print(kp_dynamo.__file__)", python, Path(folder))
        assert found.startswith(folder)


def test_telemetry_is_there_after_the_import_alone():
    _run("import kp_dynamo\nassert kp_dynamo.telemetry.snapshot()")


def test_the_integrations_are_there_after_the_import_alone():
    _run("import kp_dynamo\nassert kp_dynamo.integrations.enable_accelerate")
