"""Each part of the key alone makes another program of it."""

import shutil
import subprocess

import pytest

from tests.disk_cache.driver import ONE_DEVICE
from tests.disk_cache.process import HERE, Machine, build, build_library, misses

# Changes to the environment of the process, all but the last of which a plugin reports itself.
CHANGES = {
    "flags": {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"},
    "flags of libtpu": {"LIBTPU_INIT_ARGS": "--xla_tpu_enable_flash_attention=false"},
    "megacore": {"TPU_MEGACORE": "megacore_dense"},
    "platform": {"KP_TEST_PLATFORM": "other"},
    "version of the platform": {"KP_TEST_VERSION": "libtpu of another day"},
    "version of the API": {"KP_TEST_MINOR": "82"},
    "kind of device": {"KP_TEST_KIND": "TPU v9"},
    "process": {"KP_TEST_PROCESS": "1"},
}
PLANS = {
    "program": {"program": 2},
    "options": {"program": 1, "options": "1a06080020012801"},
    "number of devices": {"program": 1, "devices": 2},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory, library, front, plugin) -> Machine:
    """A folder with program 1."""
    folder = tmp_path_factory.mktemp("saved", numbered=True)
    folder.chmod(0o700)
    machine = Machine(folder, library, front, plugin / "xla_cpu_pjrt.so")
    assert machine.compile(1)["saved"] == 1
    return machine


@pytest.fixture
def copy(saved, tmp_path) -> Machine:
    shutil.copytree(saved.folder, tmp_path / "programs")
    front = saved.environment["KP_TPU_CACHE_PLUGIN"]
    return Machine(tmp_path / "programs", saved.library, front, saved.environment["KP_TEST_PLUGIN"])


def test_nothing_changed(copy):
    assert copy.compile(1)["hits"] == 1


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_another_environment(copy, change):
    found = copy.compile(1, **change)
    assert (found["state"], misses(found), found["saved"]) == ("on", {"absent": 1}, 1)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_another_compilation(copy, plan):
    found = copy.run([plan])
    assert (misses(found), found["saved"]) == ({"absent": 1}, 1)


@pytest.mark.slow
def test_dump_flags_dump_in_every_process(machine, tmp_path):
    """A program that is loaded is not compiled, so XLA would write nothing."""
    folder = tmp_path / "dump"
    for _ in range(2):
        shutil.rmtree(folder, ignore_errors=True)
        found = machine.compile(1, XLA_FLAGS=f"--xla_dump_to={folder}")
        assert (misses(found), found["hits"], found["saved"]) == ({"dumped": 1}, 0, 0)
        assert list(folder.iterdir())
    assert machine.entries() == []


def test_another_build_of_the_plugin_under_the_same_version(copy, tmp_path):
    other = build(tmp_path / "front.so", HERE / "front_plugin.c", KP_TEST_BUILD="other")
    assert misses(copy.compile(1, KP_TPU_CACHE_PLUGIN=str(other))) == {"absent": 1}


def test_the_same_plugin_at_another_place(copy, tmp_path):
    """A new virtual machine installs it again."""
    moved = shutil.copyfile(copy.environment["KP_TPU_CACHE_PLUGIN"], tmp_path / "moved.so")
    assert copy.compile(1, KP_TPU_CACHE_PLUGIN=str(moved))["hits"] == 1


@pytest.mark.quick("flags")
@pytest.mark.parametrize(("field", "is_part"), [("flags", True), ("cpu MHz", False)])
def test_the_processor(copy, tmp_path, field, is_part):
    """Its features decide what XLA generates. The clock changes all the time."""
    for name, value in (("one", "sse2"), ("two", "sse2 avx")):
        cpuinfo = tmp_path / name
        cpuinfo.write_text(f"processor\t: 0\n{field}\t: {value}\n\n")
        copy.library = build_library(tmp_path / f"{name}.so", KP_CPUINFO=str(cpuinfo))
        found = copy.compile(1)
    assert misses(found) == ({"absent": 1} if is_part else {})


def _entry(name: str, flag: int) -> str:
    """One entry of CompileOptionsProto.env_option_overrides, in hexadecimal: a name and a bool."""
    pair = bytes([0x0A, len(name)]) + name.encode() + bytes([0x12, 2, 0x10, flag])
    return (bytes([0x3A, len(pair)]) + pair).hex()


def test_the_order_of_a_map_is_no_part(machine):
    """C++ writes it in another order in each process."""
    first, second = _entry("xla_cpu_enable_fast_math", 1), _entry("xla_cpu_enable_fast_min_max", 1)
    machine.run([{"program": 1, "options": ONE_DEVICE + first + second}])
    assert machine.run([{"program": 1, "options": ONE_DEVICE + second + first}])["hits"] == 1
    changed = _entry("xla_cpu_enable_fast_min_max", 0)
    assert misses(machine.run([{"program": 1, "options": ONE_DEVICE + changed + first}])) == {"absent": 1}


def test_the_layouts_are_those_of_a_real_plugin(plugin, tmp_path):
    """Every struct and position that the library declares, against the header that the plugin ships."""
    subprocess.run(
        ["cc", "-std=c11", "-fsyntax-only", f"-I{plugin / 'include'}", f"-I{HERE.parents[1]}", HERE / "layouts.c"],
        check=True,
    )
