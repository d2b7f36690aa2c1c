"""The first training step of a deep model in a new process, whose programs an earlier process compiled."""

import json

import pytest

from tests.disk_cache.test_enable import ON_THE_PLUGIN, run

FIRST_STEP = """
import time
if os.environ["TEST_FOLDER"]:
    kp_dynamo.enable_disk_cache(os.environ["TEST_FOLDER"])
import torch, torch_xla
from bench import first_call, workloads
workload = workloads.llama(32).on(torch_xla.device())
workload.model.train()
options = {"precision": "float32", "blocks": os.environ["TEST_BLOCKS"]}
step = torch.compile(workload.model, backend="kp_tpu", options=options)
start = time.process_time()
first_call.run_once(step, workload, "training")
taken = time.process_time() - start
gradient = sum(parameter.grad.abs().sum() for parameter in workload.model.parameters()).item()
print(json.dumps({"first_call_s": taken, "gradient": gradient, "disk": kp_dynamo.cache_stats()["disk"]}))
"""


@pytest.fixture(params=["off", "on"])
def steps(request, machine, library, front):
    """What a process without the cache, one with an empty folder, and one after it say of their first steps."""

    def first_step(folder: str) -> dict:
        done = run(
            ON_THE_PLUGIN + FIRST_STEP, library, PJRT_DEVICE="CPUP", TEST_FRONT=str(front), TEST_FOLDER=folder,
            TEST_BLOCKS=request.param, KP_TEST_PLUGIN=machine.environment["KP_TEST_PLUGIN"],
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return [first_step(folder) for folder in ("", str(machine.folder), str(machine.folder))]


@pytest.mark.slow
def test_a_second_process_loads_all_programs(steps, record_property):
    record_property("steps", json.dumps(steps))  # `--junit-xml FILE` shows them
    without, first, second = steps
    assert not any(second["disk"]["misses"].values())
    assert second["disk"]["hits"] == first["disk"]["hits"] + first["disk"]["saved"] > 0
    assert second["disk"]["load_s"] < 0.5 * first["disk"]["compile_s"]
    assert second["gradient"] == first["gradient"] == without["gradient"]
