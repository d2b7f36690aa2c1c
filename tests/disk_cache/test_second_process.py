"""Captures in processes on a real plugin: what the first one stored, the second one runs, with the same programs."""

import json

import pytest

from tests.disk_cache.process import finish, start_script
from tests.disk_cache.test_enable import ON_THE_PLUGIN, PRELUDE

# The models come in another order in each process, which numbers functions in the order of their first use.
TRAIN = """
import time
if os.environ["TEST_FOLDER"]:
    kp_dynamo.enable_disk_cache(os.environ["TEST_FOLDER"])
import torch, torch_xla
from tests.disk_cache import models
names = os.environ["TEST_MODELS"].split(",")
results = {name: models.trained(name, os.environ["TEST_DEVICE"]) for name in names}
print(json.dumps({"results": results, "disk": kp_dynamo.cache_stats()["disk"]}))
"""
QUICK, ALL = "dropout,images", "dropout,images,tied,t5,resnet,llama"


class Process:
    """Starts processes that train models."""

    def __init__(self, machine, library, front, device: str):
        self.folder = machine.folder
        self._code, self._environment = (
            PRELUDE + ON_THE_PLUGIN + TRAIN,
            {
                "PJRT_DEVICE": "CPUP",
                "TEST_LIBRARY": str(library),
                "TEST_FRONT": str(front),
                "KP_TEST_PLUGIN": machine.environment["KP_TEST_PLUGIN"],
                "KP_TPU_CACHE_TRIAL": "1",
                "TEST_DEVICE": device,
            },
        )

    def start(self, models: str, *, has_folder: bool = True, **environment: str):
        folder = str(self.folder) if has_folder else ""
        return start_script(
            self._code, {**self._environment, "TEST_FOLDER": folder, "TEST_MODELS": models, **environment}
        )

    def run(self, models: str, **given) -> dict:
        return finish(self.start(models, **given))


@pytest.fixture
def process(machine, library, front, request) -> Process:
    return Process(machine, library, front, getattr(request, "param", "xla"))


def reversed_order(models: str) -> str:
    return ",".join(reversed(models.split(",")))


def assert_all_loaded(first: dict, second: dict) -> None:
    """Every capture and every program of the second process came from the folder, and nothing differs."""
    assert first["disk"]["captures"]["stored"] == second["disk"]["captures"]["loaded"] > 0
    assert not first["disk"]["captures"]["not_stored"]
    assert second["disk"]["captures"]["misses"] == {}
    assert not any(second["disk"]["misses"].values())
    assert second["results"] == first["results"]


def test_a_second_process_traces_nothing(process):
    first = process.run("images")
    assert_all_loaded(first, process.run("images", PYTHONHASHSEED="1"))


@pytest.mark.slow
@pytest.mark.parametrize("process", ["xla", "cpu"], indirect=True)
def test_models_in_a_second_process(process):
    """Also without a folder the bits are the same: a program from a module computes what the traced one does."""
    first = process.run(ALL)
    assert_all_loaded(first, process.run(reversed_order(ALL), PYTHONHASHSEED="1"))
    assert process.run(ALL, has_folder=False)["results"] == first["results"]


@pytest.mark.slow
def test_two_processes_at_once(process):
    both = [process.start(QUICK) for _ in range(2)]
    one, two = map(finish, both)
    assert one["results"] == two["results"]
    third = process.run(QUICK)
    assert third["disk"]["captures"]["loaded"] == 4  # two models, in training and in inference
    assert not any(third["disk"]["misses"].values())
    assert third["results"] == one["results"]


@pytest.mark.slow
def test_without_its_programs_a_capture_is_compiled_by_xla(process):
    """Somebody deleted the programs, which are larger, and so did the folder's bound."""
    first = process.run(QUICK)
    for path in process.folder.iterdir():
        if not path.read_bytes().startswith(b"KPTPU C1"):
            path.unlink()
    second = process.run(QUICK)
    assert second["disk"]["captures"]["loaded"] == first["disk"]["captures"]["stored"]
    assert second["disk"]["misses"]["absent"] == first["disk"]["misses"]["absent"]
    assert second["results"] == first["results"]


@pytest.mark.slow
def test_an_environment_that_changes_compilations_is_a_miss(process):
    process.run(QUICK)
    second = process.run(QUICK, XLA_FLAGS="--xla_cpu_enable_fast_math=false")
    assert second["disk"]["captures"]["loaded"] == 0
    assert second["disk"]["captures"]["misses"]["absent"] == second["disk"]["captures"]["stored"] > 0
    assert json.dumps(second["results"])
