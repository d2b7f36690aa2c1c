"""`enable_disk_cache`: what it refuses, and how it takes a plugin's place."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

import kp_dynamo
from kp_dynamo import TPUCacheError, TPUConfigurationError
from kp_dynamo.disk_cache import enable
from kp_dynamo.disk_cache.folder import private_folder
from tests.cli.test_check_disk_cache import install_plugin
from tests.disk_cache.process import ROOT, build

# Each process gets the library as the C files are now, whether or not the package was installed with one.
PRELUDE = """
import os, json, sys
from kp_dynamo.disk_cache import library
library.library_path = lambda: os.environ["TEST_LIBRARY"]
import kp_dynamo
"""


# XLA's CPU plugin as a device, for the code after it.
ON_THE_PLUGIN = """
from torch_xla.experimental import plugins
class Plugin(plugins.DevicePlugin):
    def library_path(self):
        return os.environ["TEST_FRONT"]
    def client_create_options(self):
        return {"cpu_device_count": 1}
plugins.use_dynamic_plugins()
plugins.register_plugin("CPUP", Plugin())
"""


def run(code: str, library, **environment: str) -> subprocess.CompletedProcess:
    """A fresh process, without a device unless `environment` names one."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KP_TPU", "PJRT", "PTXLA", "TPU_", "XLA"))
    }
    # There is no TPU here that could be tried.
    full = {**kept, "PYTHONPATH": str(ROOT), "TEST_LIBRARY": str(library), "KP_TPU_CACHE_TRIAL": "1", **environment}
    command = [sys.executable, "-c", PRELUDE + code]
    return subprocess.run(command, env=full, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("max_gb", [0, -1, float("nan"), float("inf"), "10", True, None])
def test_a_bound_that_is_none(max_gb, tmp_path):
    with pytest.raises(TPUConfigurationError, match=r"max_gb=.* is invalid. Allowed: a positive number"):
        kp_dynamo.enable_disk_cache(tmp_path, max_gb)


@pytest.mark.parametrize("max_gb", [1e300, 10**400], ids=["a float", "an int"])
def test_a_bound_above_all_disks(max_gb, tmp_path, monkeypatch):
    bounds = []
    monkeypatch.setattr(enable.fast_extremes, "is_client_started", lambda: False)
    monkeypatch.setattr(enable.pjrt_plugins, "require_plugin", lambda: None)
    monkeypatch.setattr(enable.pjrt_plugins, "plugin_behind", lambda *_: "plugin.so")
    monkeypatch.setattr(enable.pjrt_plugins, "put_in_front", lambda *_: None)
    monkeypatch.setattr(enable.library, "library_path", lambda: "library.so")
    monkeypatch.setattr(enable.library, "configure", lambda *arguments: bounds.append(arguments[-1]))
    monkeypatch.setattr(enable, "_use", lambda cache: None)
    for name in (enable.FOLDER, enable.MAX_BYTES, enable.PLUGIN):
        monkeypatch.setenv(name, "")  # to be restored
    kp_dynamo.enable_disk_cache(tmp_path, max_gb)
    assert 1e18 < bounds[0] < 2**64


@pytest.mark.parametrize("given", ["0", "-1", "inf", "nan", "10 GB"])
def test_a_variable_that_is_no_bound(given, monkeypatch):
    monkeypatch.setenv("KP_TPU_CACHE_MAX_BYTES", given)
    with pytest.raises(TPUConfigurationError, match=f"KP_TPU_CACHE_MAX_BYTES={given} is invalid. Allowed: a positive"):
        enable._bound_from_environment()


def test_after_the_device_has_started(tmp_path):
    torch.ones(1, device="xla")
    with pytest.raises(TPUCacheError, match=r"came too late: .* Try: call it right after `import kp_dynamo`"):
        kp_dynamo.enable_disk_cache(tmp_path)
    assert kp_dynamo.cache_stats()["disk"] == {"state": "not enabled"}


def test_a_new_folder_is_for_its_user_alone(tmp_path):
    folder = private_folder(tmp_path / "a" / "b")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert private_folder(str(folder)) == folder


def test_a_folder_that_others_can_write_to(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(TPUCacheError, match=r"others can write to it \(mode 0777\); chmod 700 closes it"):
        private_folder(tmp_path)


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(TPUCacheError, match="it cannot be created"):
            private_folder(path)


@pytest.mark.parametrize("folder", ["", None, "a\0b", b"programs", 3], ids=repr)
def test_a_folder_that_is_no_path(folder):
    """An empty one would be the current folder."""
    with pytest.raises(TPUCacheError, match="is invalid: it is no path"):
        private_folder(folder)


def test_a_folder_of_somebody_else(tmp_path):
    if os.geteuid():
        pytest.skip("only root can give a folder away")
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(TPUCacheError, match="it belongs to user 12345, and this process runs as 0"):
        private_folder(tmp_path)


def test_on_the_cpu_there_is_nothing_to_keep(library, tmp_path):
    done = run(f"kp_dynamo.enable_disk_cache({str(tmp_path)!r})", library, PJRT_DEVICE="CPU")
    assert "TPUCacheError: there are no programs to keep on this device: XLA:CPU" in done.stderr


def test_the_variable_is_only_a_warning(library, tmp_path):
    """The program runs on."""
    code = "print(kp_dynamo.disk_cache.enable.disk_stats())"
    done = run(code, library, PJRT_DEVICE="CPU", KP_TPU_CACHE_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "{'state': 'not enabled'}\n")
    assert f"KP_TPU_CACHE_DIR={tmp_path} has no effect: there are no programs to keep" in done.stderr


ON_A_TPU = """
def show():
    names = ("TPU_LIBRARY_PATH", "KP_TPU_CACHE_PLUGIN", "KP_TPU_CACHE_DIR", "KP_TPU_CACHE_MAX_BYTES")
    print(json.dumps([os.environ.get(name) for name in names]))
from kp_dynamo.disk_cache.enable import disk_stats
"""


def test_it_takes_the_place_of_libtpu(library, tmp_path):
    """Twice, as in a child process that inherits the variables; and libtpu is a version that it was made for."""
    libtpu = pytest.importorskip("libtpu").get_library_path()
    code = f"""{ON_A_TPU}
for folder, max_gb in (("one", 10), ("two", 0.5)):
    kp_dynamo.enable_disk_cache({str(tmp_path)!r} + "/" + folder, max_gb)
    show()
import ctypes
before = disk_stats()["state"]
ctypes.CDLL(os.environ["TPU_LIBRARY_PATH"]).GetPjrtApi()
print(json.dumps([before, disk_stats()["state"]]))
"""
    done = run(code, library, PJRT_DEVICE="TPU")
    assert done.returncode == 0, done.stderr[-3000:]
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        [str(library), libtpu, f"{tmp_path}/one", "10000000000"],
        [str(library), libtpu, f"{tmp_path}/two", "500000000"],
        ["no device has started", "on"],
    ]


def test_variables_that_are_removed_before_the_device_starts(library, tmp_path):
    """They are for child processes only."""
    pytest.importorskip("libtpu")
    code = f"""{ON_A_TPU}
kp_dynamo.enable_disk_cache({str(tmp_path / "programs")!r})
for name in [name for name in os.environ if name.startswith("KP_TPU_CACHE_")]:
    del os.environ[name]
import ctypes
get = ctypes.CDLL(os.environ["TPU_LIBRARY_PATH"]).GetPjrtApi
get.restype = ctypes.c_void_p
print(json.dumps([bool(get()), disk_stats()["state"]]))
"""
    done = run(code, library, PJRT_DEVICE="TPU")
    assert json.loads(done.stdout) == [True, "on"], done.stderr[-3000:]


def test_a_child_that_inherits_the_library_alone(library, tmp_path):
    """Its variables were removed, so that it does not use the cache: libtpu is found as without it."""
    code = """
from kp_dynamo.disk_cache import enable
enable.enable_from_environment()
print(json.dumps([os.environ.get("TPU_LIBRARY_PATH"), enable.disk_stats()["state"]]))
"""
    for given in ({}, {"PTXLA_TPU_LIBRARY_PATH": "/mine/libtpu.so"}):
        done = run(code, library, PJRT_DEVICE="TPU", TPU_LIBRARY_PATH=str(library), **given)
        expected = [given.get("PTXLA_TPU_LIBRARY_PATH"), "not enabled"]
        assert json.loads(done.stdout) == expected, done.stderr[-3000:]


WITHOUT_KP_DYNAMO = """
import ctypes, os
library = ctypes.CDLL(os.environ["TPU_LIBRARY_PATH"])
library.GetPjrtApi.restype = ctypes.c_void_p
library.kp_cache_state.restype = ctypes.c_char_p
print(bool(library.GetPjrtApi()), library.kp_cache_state().decode())
"""


def test_a_child_without_kp_dynamo(library, tmp_path):
    """It loads our library in the place of libtpu, which forwards to libtpu."""
    pytest.importorskip("libtpu")
    code = f"""
kp_dynamo.enable_disk_cache({str(tmp_path / "programs")!r})
import subprocess
for name in [name for name in os.environ if name.startswith("KP_TPU_CACHE_")]:
    del os.environ[name]
subprocess.run([sys.executable, "-c", {WITHOUT_KP_DYNAMO!r}], check=True)
"""
    done = run(code, library, PJRT_DEVICE="TPU")
    assert done.stdout == "True no folder was given\n", done.stderr[-3000:]


def test_a_library_of_another_version_changes_nothing(tmp_path):
    """As after an update of a source folder, without a new build."""
    (tmp_path / "old.c").write_text("int kp_cache_counter(int which) { return which; }\n")
    old = build(tmp_path / "old.so", tmp_path / "old.c", visibility="default")
    code = f"""{ON_A_TPU}
try:
    kp_dynamo.enable_disk_cache({str(tmp_path / "programs")!r})
except kp_dynamo.TPUCacheError as error:
    print(json.dumps("It may be of another version of kp_dynamo. Try: install" in str(error)))
show()
"""
    libtpu = pytest.importorskip("libtpu").get_library_path()
    done = run(code, old, PJRT_DEVICE="TPU", TPU_LIBRARY_PATH=libtpu)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [True, [libtpu, None, None, None]], done.stderr


@pytest.mark.parametrize("max_gb", [1e30, float(sys.maxsize)])
def test_a_bound_of_any_size(max_gb, library, machine, front):
    code = f"""
from tests.disk_cache import driver
path = os.environ["TEST_LIBRARY"]
library.configure(path, {str(front)!r}, {str(machine.folder)!r}, int({max_gb!r} * 1e9))
print(json.dumps(driver.main(path, [{{"program": 1}}])))
"""
    done = run(code, library, KP_TEST_PLUGIN=machine.environment["KP_TEST_PLUGIN"])
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["saved"], found["too_large"]) == (1, 0), done.stderr[-3000:]


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"KP_TPU_CACHE_DIR": "~nobody-of-this-name/programs"}, "it is no path (Could not determine home"),
        ({"KP_TPU_CACHE_DIR": "programs", "KP_TPU_CACHE_MAX_BYTES": "inf"},
         "KP_TPU_CACHE_DIR=programs has no effect: KP_TPU_CACHE_MAX_BYTES=inf is invalid. Allowed: a positive number"),
        ({"KP_TPU_CACHE_DIR": "programs", "KP_TPU_CACHE_MAX_BYTES": "inf", "KP_TPU_CACHE_PLUGIN": "libtpu.so",
          "TPU_LIBRARY_PATH": "library"}, "KP_TPU_CACHE_MAX_BYTES=inf is invalid"),
    ],
    ids=["no home", "a bound", "a bound of a parent"],
)  # fmt: skip
def test_variables_that_mean_nothing_are_a_warning(variables, reason, library, tmp_path):
    """`import kp_dynamo` does not fail."""
    given = {name: str(library) if value == "library" else value for name, value in variables.items()}
    code = f"os.chdir({str(tmp_path)!r}); kp_dynamo.disk_cache.enable.enable_from_environment()"
    done = run("import kp_dynamo.disk_cache.enable\n" + code, library, PJRT_DEVICE="TPU", **given)
    assert done.returncode == 0, done.stderr[-3000:]
    assert reason in done.stderr


# What a trial on this machine finds.
UNFIT = """
from kp_dynamo.disk_cache import trial
trial.try_in_two_processes = lambda timeout_s: trial.Outcome(False, "other bits.")
"""


def test_a_tpu_on_which_it_does_not_work(library, tmp_path):
    libtpu = pytest.importorskip("libtpu").get_library_path()
    code = f"""{ON_A_TPU}{UNFIT}
kp_dynamo.enable_disk_cache({str(tmp_path / "programs")!r})
show()
print(json.dumps(disk_stats()["state"]))
"""
    done = run(code, library, PJRT_DEVICE="TPU", TPU_LIBRARY_PATH=libtpu, KP_TPU_CACHE_TRIAL="")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the disk cache is off, because it does not work on this machine: other bits. Try: `python -m" in done.stderr
    variables, state = map(json.loads, done.stdout.splitlines())
    assert variables == [libtpu, None, None, None]
    assert state.startswith("it does not work on this machine: other bits.")


def test_the_example_of_the_page(library, tmp_path):
    page = (ROOT / "docs" / "disk-cache.md").read_text()
    (code,) = re.findall(r"```python device=TPU\n(.*?)```", page, re.S)
    done = run(code, library, PJRT_DEVICE="TPU", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / ".cache" / "kp_dynamo").is_dir()


def test_a_libtpu_of_the_user_stays_the_one_behind(library, tmp_path):
    mine = tmp_path / "mine.so"
    mine.touch()
    folder = str(tmp_path / "programs")
    code = f"""{ON_A_TPU}
os.environ["KP_TPU_CACHE_DIR"] = {folder!r}
kp_dynamo.disk_cache.enable.enable_from_environment()
show()
"""
    done = run(code, library, PJRT_DEVICE="TPU", TPU_LIBRARY_PATH=str(mine))
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == [str(library), str(mine), folder, "10000000000"]


def test_a_libtpu_that_is_not_there(library, tmp_path):
    code = f"kp_dynamo.enable_disk_cache({str(tmp_path)!r})"
    done = run(code, library, PJRT_DEVICE="TPU", TPU_LIBRARY_PATH="/nowhere/libtpu.so")
    assert "TPUCacheError: the PJRT plugin of PJRT_DEVICE=TPU was not found (looked for '/nowhere" in done.stderr


def test_without_a_library_it_says_how_to_get_one(tmp_path):
    code = """
from pathlib import Path
import importlib
importlib.reload(library)
library.EXTENSION_SUFFIXES = [".none.so"]
library.library_path()
"""
    done = run(code, "unused", PJRT_DEVICE="TPU")
    assert "TPUCacheError: the disk cache's library _plugin.none.so was not built" in done.stderr
    assert "Try: install a C compiler" in done.stderr


# Programs of lazy tensors that read one another's results, and three steps of training through the backend.
TRAIN = """
import copy, torch
kp_dynamo.enable_disk_cache(os.environ["TEST_FOLDER"])
import torch_xla
a = torch.arange(12.0).to("xla")
b = a * 2
torch_xla.sync(wait=True)
assert b.sum().item() == 132
# A batched matmul has a map of two attributes, whose order differs between processes.
for size in range(1, 9):
    assert torch.bmm(torch.ones(2, size, 3, device="xla"), torch.ones(2, 3, 5, device="xla")).sum().item() == 30 * size
torch.manual_seed(0)
eager = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
placed = copy.deepcopy(eager).to("xla")
x, y = torch.randn(6, 8), torch.randn(6, 4)
def train(model, forward, x, y):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(forward(x), y).backward()
        optimizer.step()
        torch_xla.sync()
train(eager, eager, x, y)
train(placed, torch.compile(placed, backend="kp_tpu", options={"precision": "float32"}), x.to("xla"), y.to("xla"))
weights = [parameter.detach().cpu() for parameter in placed.parameters()]
for found, wanted in zip(weights, eager.parameters()):
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-5, atol=1e-6)
kp_dynamo.disk_cache.enable.enable_from_environment()  # what a child process does
for name in [name for name in os.environ if name.startswith("KP_TPU_CACHE_")]:
    del os.environ[name]  # they are for child processes
report = kp_dynamo.explain(torch.nn.Linear(8, 3), torch.randn(2, 8))
stats = kp_dynamo.cache_stats()["disk"]
weights = [weight.flatten().tolist() for weight in weights]
print(json.dumps({"stats": stats, "explained": str(report), "weights": weights}))
"""


def test_training_in_a_second_process_compiles_nothing(machine, library, front):
    environment = {
        "PJRT_DEVICE": "CPUP",
        "TEST_FRONT": str(front),
        "TEST_FOLDER": str(machine.folder),
        "KP_TEST_PLUGIN": machine.environment["KP_TEST_PLUGIN"],
        "KP_TPU_LOG": "json",
    }
    results, logged = [], []
    for _ in range(2):
        done = run(ON_THE_PLUGIN + TRAIN, library, **environment)
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
        logged += [line for line in lines if line.get("event") == "disk cache"]
        assert "has no effect" not in done.stderr
        results.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = (result["stats"] for result in results)
    assert first["state"] == second["state"] == "on"
    assert first["misses"]["absent"] == first["saved"] >= 12
    assert not any(second["misses"].values())
    assert (second["hits"], second["saved"]) == (first["hits"] + first["saved"], 0)
    assert second["compile_s"] == 0 < second["load_s"] < second["avoided_compile_s"]
    assert results[0]["weights"] == results[1]["weights"]
    assert [line["hits"] for line in logged] == [first["hits"], second["hits"]]
    assert "compiled: none; saved: 0" in logged[1]["message"]
    # `explain` counts what happened during its own run.
    lines = [
        next(line for line in result["explained"].splitlines() if line.startswith("disk cache: ")) for result in results
    ]
    assert re.fullmatch(r"disk cache: \d+ hits?.*; [1-9]\d* miss(es)? \(absent \d+\)", lines[0])
    assert re.fullmatch(r"disk cache: [1-9]\d* hits?, \d+\.\d+ MB in .* s instead of .* s; 0 misses", lines[1])
    assert 0 < second["read_s"] < second["load_s"]


@pytest.mark.slow
def test_a_plugin_of_an_installed_package(tmp_path):
    """By the variable, before torch_xla is imported."""
    environment = {**install_plugin(tmp_path), "KP_TPU_CACHE_DIR": str(tmp_path / "programs")}
    code = """
import kp_dynamo, torch
assert (torch.ones(3, device="xla") + 1).sum().item() == 6
print(kp_dynamo.cache_stats()["disk"]["state"])
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "on\n"), done.stderr[-3000:]


FORK = """
kp_dynamo.enable_disk_cache(os.environ["TEST_FOLDER"])
import torch
if (child := os.fork()) == 0:
    try:
        torch.compile(torch.sin, backend="kp_tpu")(torch.ones(3))
    except Exception as problem:
        print(type(problem.inner_exception).__name__, flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.slow
def test_a_fork_after_it_is_enabled_is_an_error(library, front, tmp_path):
    """torch_xla has been imported by then. The client that such a child would start ended it by a signal."""
    folder = str(tmp_path / "programs")
    done = run(ON_THE_PLUGIN + FORK, library, TEST_FRONT=str(front), TEST_FOLDER=folder, PJRT_DEVICE="CPUP")
    assert done.stdout.split() == ["TPUDeviceError", "0"]
