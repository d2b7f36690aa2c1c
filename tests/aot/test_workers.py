"""The worker processes of the TPU compiler: how many there are, in which order they answer, and how they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import kp_dynamo
from kp_dynamo.aot import compiler, worker_process
from kp_dynamo.aot.compiler import TpuCompiler
from kp_dynamo.exceptions import TPUOutOfMemoryError, XLACompilationError, XLACompilationTimeoutError

# A worker whose "program" is a command. It answers with its process id as the FLOPs, and the program's id as the bytes.
FAKE_WORKER = """
import json, os, pathlib, sys, time
if {broken} and os.environ["TPU_LOG_DIR"].endswith("worker1"):
    sys.exit("no memory for a second one")
print(json.dumps({{"ready": {{"jax": "0"}}}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    told = json.loads(pathlib.Path(request["stablehlo"]).read_text())
    pathlib.Path("{folder}", f"{{told['id']}}.{{os.getpid()}}").touch()
    until = time.monotonic() + 20
    while "after" in told and not list(pathlib.Path("{folder}").glob(f"{{told['after']}}.*")):
        if time.monotonic() > until:
            told["failed"] = "it waited alone"
            break
        time.sleep(0.01)
    time.sleep(told.get("sleep", 0))
    pathlib.Path(request["hlo"]).touch()
    sizes = dict.fromkeys(("argument_bytes", "output_bytes", "temp_bytes", "alias_bytes", "generated_code_bytes"), 0)
    figures = {{"seconds": 0.0, "flops": os.getpid(), "bytes": told["id"], **sizes}}
    print(json.dumps({{"failed": told["failed"]}} if "failed" in told else figures), flush=True)
"""


@pytest.fixture
def fake_workers(monkeypatch, tmp_path):
    """Fake workers on a number of cores."""

    def on(cores: int, broken: bool = False) -> Path:
        worker = tmp_path / "worker.py"
        worker.write_text(FAKE_WORKER.format(folder=tmp_path, broken=broken))
        monkeypatch.setattr(worker_process, "_WORKER", worker)
        monkeypatch.setattr(compiler, "num_cores", lambda: cores)
        return tmp_path

    return on


def submit(tpu: TpuCompiler, *programs: dict[str, object]) -> None:
    for number, program in enumerate(programs):
        tpu.submit(json.dumps({"id": number, **program}).encode())


def num_processes(tpu: TpuCompiler, num_programs: int) -> int:
    return len({tpu.result().flops for _ in range(num_programs)})


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_two_programs_compile_at_the_same_time(fake_workers):
    fake_workers(cores=2)
    with TpuCompiler("v5e", time.monotonic() + 60) as tpu:
        submit(tpu, {"after": 1}, {"after": 0})
        assert num_processes(tpu, 2) == 2


def test_results_come_in_the_order_of_the_programs(fake_workers):
    fake_workers(cores=3)
    with TpuCompiler("v5e", time.monotonic() + 60) as tpu:
        submit(tpu, {"after": 3}, {}, {}, {})
        assert [tpu.result().bytes for _ in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("cores", "num_programs", "at_most"), [(1, 3, 1), (4, 1, 1), (2, 6, 2)])
def test_no_more_workers_than_cores_or_programs(fake_workers, cores, num_programs, at_most):
    fake_workers(cores)
    with TpuCompiler("v5e", time.monotonic() + 60) as tpu:
        submit(tpu, *[{"sleep": 0.1}] * num_programs)
        assert len(tpu._workers) == at_most
        assert num_processes(tpu, num_programs) <= at_most


def test_a_program_that_is_compiled_keeps_no_worker_busy(fake_workers):
    fake_workers(cores=2)
    with TpuCompiler("v5e", time.monotonic() + 60) as tpu:
        for _ in range(3):
            submit(tpu, {})
            tpu.result()
        assert len(tpu._workers) == 1


def test_without_free_memory_one_worker_compiles_everything(fake_workers, monkeypatch):
    fake_workers(cores=2)
    monkeypatch.setattr(compiler, "_free_bytes", lambda: 2**30)
    with TpuCompiler("v5e", time.monotonic() + 60) as tpu:
        submit(tpu, *[{"sleep": 0.1}] * 3)
        assert num_processes(tpu, 3) == 1


def test_free_memory_is_that_of_this_machine():
    assert 2**20 < compiler._free_bytes() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_further_worker_that_cannot_start_leaves_its_work_to_the_first(fake_workers):
    fake_workers(cores=2, broken=True)
    with TpuCompiler("v5e", time.monotonic() + 60) as tpu:
        submit(tpu, *[{"sleep": 0.1}] * 4)
        assert len(tpu._workers) == 2
        assert num_processes(tpu, 4) == 1


def test_the_error_is_that_of_the_first_program_that_fails(fake_workers):
    fake_workers(cores=2)
    with TpuCompiler("v5e", time.monotonic() + 60) as tpu:
        submit(tpu, {"after": 1, "failed": "RESOURCE_EXHAUSTED: first"}, {"failed": "second"}, {})
        with pytest.raises(TPUOutOfMemoryError, match="first"):
            tpu.result()
        with pytest.raises(XLACompilationError, match="second"):
            tpu.result()
        assert tpu.result().bytes == 2


def wait_for_workers(folder: Path, count: int) -> None:
    until = time.monotonic() + 20
    while len(list(folder.glob("[0-9].*"))) < count:
        assert time.monotonic() < until
        time.sleep(0.01)


def require_none_runs(folder: Path) -> None:
    assert not [file for file in folder.glob("[0-9].*") if is_running(int(file.suffix[1:]))]


def test_a_deadline_ends_every_worker(fake_workers):
    folder = fake_workers(cores=2)
    with TpuCompiler("v5e", time.monotonic() + 4) as tpu:
        submit(tpu, *[{"sleep": 60}] * 3)
        wait_for_workers(folder, 2)
        with pytest.raises(XLACompilationTimeoutError, match="exceeded its time limit"):
            tpu.result()
    require_none_runs(folder)


def test_an_error_while_tracing_ends_every_worker(fake_workers):
    folder = fake_workers(cores=2)

    def interrupted() -> None:
        with TpuCompiler("v5e") as tpu:
            submit(tpu, *[{"sleep": 60}] * 3)
            wait_for_workers(folder, 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    require_none_runs(folder)


def test_a_worker_ends_with_the_process_that_asked():
    """Its standard input ends then, and it must not compile on for minutes."""
    script = f"""
import importlib.util, time
spec = importlib.util.spec_from_file_location("worker", {str(worker_process._WORKER)!r})
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)
class Slow:
    versions = {{}}
    def __init__(self, target): pass
    def compiled(self, *request):
        print("compiling", flush=True)
        time.sleep(300)
worker._Compiler = Slow
worker.main()
"""
    request = json.dumps({"stablehlo": "", "hlo": "", "donated": []}) + "\n"
    command = [sys.executable, "-c", script, "v5e"]
    subprocess.run(command, input=request, text=True, timeout=60, check=True, stderr=subprocess.DEVNULL)


_FREES = """
import runpy, sys
worker = runpy.run_path(sys.argv[1])
def resident():
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmRSS")]
    return int(line.split()[1])
blocks = [bytes(4000) for _ in range(50_000)]
kept = blocks[::100]  # the heap cannot shrink below them
del blocks
before = resident()
worker["_return_memory"]()
print((before - resident()) / before)
"""


def test_a_worker_gives_memory_back_between_programs():
    command = [sys.executable, "-c", _FREES, worker_process._WORKER]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert float(found.stdout) > 0.7


def test_a_report_is_the_same_from_one_process_and_from_two(monkeypatch):
    def figures(cores: int) -> dict[str, object]:
        monkeypatch.setattr(compiler, "num_cores", lambda: cores)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 16))
        report = kp_dynamo.aot_compile(model, (torch.ones(32, 64),), train=True)
        content = report.to_dict()
        del content["seconds"], content["peak_host_mib"], content["totals"]["tpu_compile_s"]
        return {**content, "programs": [{**p, "compile_s": 0} for p in content["programs"]]}

    assert figures(2) == figures(1)
