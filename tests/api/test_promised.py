"""What the object API promises: each name, and code written for such an API, which differs in its imports only."""

import textwrap

import pytest

import kp_dynamo
from tests.spine import run_script

MEMBERS = {
    "TPUBackend": (
        "device world_size rank is_distributed device_count prepare_model prepare_data optimize_for_inference "
        "optimize_for_training synchronize get_memory_stats clear_cache save_model load_model"
    ),
    "TPUOptimizer": "optimize optimize_for_inference optimize_for_training get_optimization_stats clear_cache",
    "XLACompiler": (
        "compile_model optimize_for_inference optimize_for_training get_compilation_stats benchmark_compilation "
        "clear_cache"
    ),
    "TPUMemoryManager": (
        "allocate_tensor optimize_tensor_layout create_memory_pool get_tensor_from_pool return_tensor_to_pool "
        "get_pool_stats get_memory_stats monitor_memory optimize_memory_usage clear_memory_pools"
    ),
    "XLADeviceManager": "device devices world_size rank set_device sync_all_devices get_device_stats",
    "XLADistributedTraining": "is_distributed wrap_model all_reduce all_gather barrier",
    "XLAOptimizations": "optimize_model_for_xla add_compilation_hints enable_dynamic_shapes",
    "XLAUtilities": "get_xla_env_info profile_xla_compilation debug_xla_graph optimize_xla_flags",
    "LRUCache": "get set clear get_stats __len__",
}


@pytest.mark.parametrize("name", MEMBERS)
def test_every_member_is_there(name):
    assert [member for member in MEMBERS[name].split() if not hasattr(getattr(kp_dynamo, name), member)] == []


SETTING = """
import torch
from torch import nn
from kp_dynamo import *
from kp_dynamo.config import KernelPyTorchConfig, TPUConfig, TPUVersion
from kp_dynamo.exceptions import *
torch.manual_seed(0)
config = KernelPyTorchConfig()
model = nn.Sequential(nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 4))
x, loader = torch.randn(8, 32), [(torch.randn(8, 32), torch.randint(4, (8,))) for _ in range(2)]
"""

SAMPLES = {
    "quick start": """
        backend = TPUBackend(config)
        backend.prepare_model(model)
        result = TPUOptimizer(config).optimize(model, sample_inputs=x, optimization_level="balanced")
        print(f"{backend.device} {backend.world_size} {backend.rank} {backend.is_distributed}")
        print(f"{result.optimization_time:.2f}s {result.performance_metrics}")
        assert isinstance(result.optimized_model, nn.Module)
        print(backend.get_memory_stats()["model_cache_stats"])
    """,
    "configuration": """
        tpu = config.hardware.tpu
        tpu.version, tpu.memory_fraction, tpu.mixed_precision, tpu.precision = TPUVersion.V5P, 0.9, True, "bfloat16"
        tpu.cache_max_size, tpu.compilation_timeout_seconds, tpu.gradient_checkpointing = 100, 300, False
        tpu.allocation_history_retention_seconds, tpu.v6e_memory_gb, tpu.v7_memory_gb = 3600, 32.0, 128.0
        tpu.monitoring_interval_seconds, tpu.monitoring_duration_seconds = 1.0, 60.0
        for mode in ("inference", "training", "development"):
            KernelPyTorchConfig(mode=mode).hardware.tpu.xla_optimization_level = 0
    """,
    "a compiler and its statistics": """
        compiler = XLACompiler(config.hardware.tpu)
        assert compiler.compile_model(model, sample_inputs=x, use_cache=True)(x).shape == (8, 4)
        cache = compiler.get_compilation_stats()["compilation_cache"]
        print(f"{cache['hit_rate']:.2%} {cache['evictions']}")
    """,
    "levels": """
        optimizer = TPUOptimizer(config)
        optimizer.optimize_for_inference(model, x)
        optimizer.optimize_for_training(model, x)
        try:
            optimizer.optimize(model, x, optimization_level="extreme")
        except ValueError as error:
            assert "Unknown optimization level" in str(error)
        assert optimizer.get_optimization_stats()["total_optimizations"] == 2
    """,
    "training and checkpoints": """
        import os, tempfile
        backend = TPUBackend(KernelPyTorchConfig(mode="training"))
        model = backend.prepare_model(model)
        adam = torch.optim.Adam(model.parameters())
        for batch in loader:
            data, target = backend.prepare_data(batch)
            adam.zero_grad()
            nn.functional.cross_entropy(model(data), target).backward()
            adam.step()
            backend.synchronize()
        path = os.path.join(tempfile.mkdtemp(), "model.pth")
        backend.save_model(model, path, save_optimizer=True, optimizer=adam)
        assert backend.load_model(model, path, load_optimizer=True, optimizer=adam) is model
    """,
    "memory": """
        manager = TPUMemoryManager(config.hardware.tpu)
        held = manager.allocate_tensor((100, 100), dtype=torch.float32)
        pool = manager.create_memory_pool(pool_size=4, tensor_size=(8, 16, 16))
        for batch in loader:
            assert manager.return_tensor_to_pool(pool, manager.get_tensor_from_pool(pool))
        print(f"{manager.get_pool_stats()['pool_details'][pool]['utilization']:.2%}")
        history = manager.monitor_memory(interval=0.01, duration=0.02)
        assert max(s.allocated_memory for s in history) >= held.nbytes
    """,
    "devices and collectives": """
        devices, distributed, optimizations = create_xla_integration(config.hardware.tpu)
        assert devices.device in devices.devices
        wrapped = distributed.wrap_model(model)
        assert distributed.all_reduce(torch.ones(3), op="mean").tolist() == [1, 1, 1]
        assert optimizations.enable_dynamic_shapes(optimizations.add_compilation_hints(model)) is model
    """,
    "errors": """
        try:
            TPUBackend(config).prepare_model(3)
        except (TPUNotAvailableError, TPUValidationError):
            raise AssertionError from None
        except TPUBackendError as error:
            print(error)
        config.hardware.tpu.enable_strict_validation = True
        try:
            TPUOptimizer(config).optimize(model, torch.randn(8, 3))
        except TPUValidationError as error:
            print(error)
        else:
            raise AssertionError
    """,
}


def test_code_for_such_an_api_runs():
    """Each sample has its own names, all of them one process, for its start takes seconds."""
    run_script(
        f"samples = {[(name, SETTING + textwrap.dedent(code)) for name, code in SAMPLES.items()]!r}\n"
        + """
for name, code in samples:
    exec(compile(code, name, "exec"), {"__name__": "sample"})
"""
    )
