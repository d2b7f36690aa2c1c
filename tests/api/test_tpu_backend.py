"""`TPUBackend`: the device, models and data on it, what is refused, and files handed to the checkpoint functions."""

import os
from collections import UserDict
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn

import kp_dynamo
from kp_dynamo import (
    KernelPyTorchConfig,
    TPUBackend,
    TPUCheckpointError,
    TPUConfig,
    TPUConfigurationError,
    TPUDeviceError,
    TPUDistributedError,
    TPUModelPreparationError,
    TPUNotAvailableError,
)
from kp_dynamo.api import environment, tpu_backend
from kp_dynamo.api.environment import apply_flags
from kp_dynamo.compat import xla
from tests.spine import counted, run_script


def config_with(**fields):
    config = KernelPyTorchConfig()
    config.hardware.tpu = TPUConfig(**fields)
    return config


@pytest.fixture
def backend():
    kp_dynamo.clear_cache()
    return TPUBackend()


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def test_the_device_and_a_world_of_one(backend):
    assert backend.device == xla.device()
    assert (backend.world_size, backend.rank, backend.is_distributed, backend.device_count) == (1, 0, False, 1)
    assert backend.config == KernelPyTorchConfig()


def test_a_prepared_model_is_the_same_module_on_the_device(backend):
    model = mlp()
    x = torch.randn(8, 16)
    expected = model(x)
    assert backend.prepare_model(model) is model
    assert {p.device.type for p in model.parameters()} == {"xla"}
    torch.testing.assert_close(model(backend.prepare_data(x)).cpu(), expected, rtol=1e-5, atol=1e-6)


def test_tied_parameters_stay_tied(backend):
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    backend.prepare_model(model)
    assert model["head"].weight is model["embed"].weight
    assert model["head"].weight.device.type == "xla"


def test_tied_buffers_stay_tied(backend):
    model = nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(4)])
    model[1].running_mean = model[0].running_mean
    backend.prepare_model(model)
    assert model[1].running_mean is model[0].running_mean
    assert model[1].running_var is not model[0].running_var
    assert model[1].running_mean.device.type == "xla"


def test_a_model_is_prepared_after_it_was_compiled_on_the_cpu(backend):
    model, x = mlp(), torch.randn(8, 16)
    compiled = backend.compiler.compile_model(model, x)
    expected = model(x)
    backend.prepare_model(compiled)
    torch.testing.assert_close(compiled(x.to(backend.device)).cpu(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("model", [None, "model", nn.functional.relu, nn.Linear])
def test_what_is_no_model_is_refused(backend, model):
    with pytest.raises(TPUModelPreparationError, match=r"Allowed: a torch\.nn\.Module"):
        backend.prepare_model(model)


def test_a_lazy_model_is_refused(backend):
    with pytest.raises(TPUModelPreparationError, match="weight has no shape yet"):
        backend.prepare_model(nn.LazyLinear(3))


def test_a_model_without_memory_is_refused_in_our_words(backend):
    with pytest.raises(TPUModelPreparationError, match="cannot be moved to xla:0"):
        backend.prepare_model(nn.Linear(2, 2, device="meta"))


class Pair(NamedTuple):
    x: torch.Tensor
    label: int


@pytest.mark.parametrize(
    "data",
    [
        torch.ones(2),
        {"x": torch.ones(2), "name": "a"},
        [torch.ones(2), 3],
        (torch.ones(2), {"y": [torch.zeros(1), None]}),
        Pair(torch.ones(1), 5),
    ],
    ids=["tensor", "dict", "list", "nested", "namedtuple"],
)
def test_data_keeps_its_structure(backend, data):
    moved = backend.prepare_data(data)
    before, tree = torch.utils._pytree.tree_flatten(data)
    after, same_tree = torch.utils._pytree.tree_flatten(moved)
    assert tree == same_tree
    for old, new in zip(before, after, strict=True):
        if isinstance(old, torch.Tensor):
            assert (new.device.type, new.tolist()) == ("xla", old.tolist())
        else:
            assert new is old


@pytest.mark.parametrize(("data", "found"), [("abc", "str"), ({}, "nothing"), ([1, 2.5], "float, int")])
def test_data_without_a_tensor_is_refused(backend, data, found):
    with pytest.raises(TPUDeviceError, match=f"data contains no tensor, only {found}"):
        backend.prepare_data(data)


def test_tensors_inside_of_another_object_are_named(backend):
    with pytest.raises(TPUDeviceError, match=r"data has tensors inside of a UserDict, .* Try: dict\(\) of a mapping"):
        backend.prepare_data([torch.ones(2), UserDict(x=torch.ones(2))])


def test_optimized_models_are_on_the_device_and_compiled(backend):
    model, x = mlp(), torch.randn(8, 16)
    expected = model(x)
    with counted() as counts:
        trained = backend.optimize_for_training(model, x.to(backend.device))
    assert (counts.programs, counts.graphs, model.training) == (2, 2, True)
    with counted() as counts:
        inferred = backend.optimize_for_inference(model, x)
    assert (counts.programs, counts.graphs, model.training) == (1, 1, False)
    result = inferred(x.to(backend.device))
    assert not result.requires_grad
    torch.testing.assert_close(result.cpu(), expected.detach(), rtol=2e-2, atol=2e-2)
    assert trained(x.to(backend.device)).requires_grad


def test_memory_stats_have_figures_and_none_where_nothing_is_known(backend):
    backend.compiler.compile_model(mlp())
    backend.compiler.compile_model(mlp())
    stats = backend.get_memory_stats()
    assert stats["model_cache_stats"] == {"size": 2, "hits": 0, "misses": 2, "hit_rate": 0.0, "evictions": 0}
    assert (stats["device"], stats["world_size"], stats["rank"]) == ("xla:0", 1, 0)
    assert stats["device_memory"] is None  # XLA's CPU device does not count


def test_clearing_lets_models_and_programs_go(backend):
    model, x = mlp(), torch.randn(8, 16)
    compiled = backend.compiler.compile_model(model, x)
    backend.clear_cache()
    assert backend.get_memory_stats()["model_cache_stats"]["size"] == 0
    assert kp_dynamo.cache_stats()["size"] == 0
    with counted() as counts:
        compiled(x)
    assert counts.programs == 1, "what is in use compiles again"


def test_synchronize_runs_what_is_pending(backend):
    x = torch.ones(2, device=backend.device) + 1
    backend.synchronize()
    assert x.cpu().tolist() == [2, 2]


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (config_with(enabled=False), TPUNotAvailableError, "enabled=False"),
        (config_with(topology="pod"), TPUDistributedError, "topology=POD"),
        (config_with(xla_flags="--xla_tpu_late"), TPUConfigurationError, "--xla_tpu_late' is too late: the XLA client"),
        (TPUConfig(), TPUConfigurationError, "config of type TPUConfig is invalid. Allowed: a KernelPyTorchConfig"),
    ],
)
def test_what_cannot_be_had(config, error, message):
    with pytest.raises(error, match=message):
        TPUBackend(config)


def test_a_missing_torch_xla_is_named(monkeypatch):
    def missing():
        raise TPUNotAvailableError("torch_xla is not installed")

    monkeypatch.setattr(xla, "device", missing)
    with pytest.raises(TPUNotAvailableError, match="torch_xla is not installed"):
        TPUBackend()


def test_flags_go_into_the_variable_of_their_reader_and_once(monkeypatch):
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        monkeypatch.setenv(name, "--there")
    monkeypatch.setattr(xla, "is_started", lambda: False)
    tried = []
    monkeypatch.setattr(environment, "_problem", lambda flags: tried.append(flags) or "")
    for _ in range(2):
        apply_flags("--xla_tpu_a=1 --xla_b --xla_jf_c=2 --there")
    assert os.environ["LIBTPU_INIT_ARGS"] == "--there --xla_tpu_a=1 --xla_jf_c=2"
    assert os.environ["XLA_FLAGS"] == "--there --xla_b"
    assert tried == [("--xla_b",)]
    monkeypatch.setattr(xla, "is_started", lambda: True)
    apply_flags("--xla_b --xla_tpu_a=1")
    apply_flags(None)
    with pytest.raises(TPUConfigurationError, match="xla_flags='--xla_b=2' is too late"):
        apply_flags("--xla_b --xla_b=2")


@pytest.mark.parametrize(
    "flag", ["--xla_there_is_none=1", pytest.param("--xla_cpu_enable_fast_math=banana", marks=pytest.mark.slow)]
)
def test_a_flag_that_would_end_the_process_is_an_error(monkeypatch, flag):
    monkeypatch.setattr(xla, "is_started", lambda: False)
    before = dict(os.environ)
    with pytest.raises(
        TPUConfigurationError, match=f"xla_flags='{flag}' is invalid: XLA does not start with it: .*xla_"
    ):
        apply_flags(flag)
    assert dict(os.environ) == before


@pytest.mark.slow
def test_flags_are_set_before_the_client_starts():
    """In a process of its own: the client reads them once. The second backend finds them there."""
    run_script("""
import os
from kp_dynamo import KernelPyTorchConfig, TPUBackend
config = KernelPyTorchConfig()
config.hardware.tpu.xla_flags = "--xla_tpu_scoped_vmem_limit_kib=65536 --xla_cpu_enable_fast_math=false"
TPUBackend(config), TPUBackend(config)
assert os.environ["LIBTPU_INIT_ARGS"].split() == ["--xla_tpu_scoped_vmem_limit_kib=65536"], os.environ
assert "--xla_cpu_enable_fast_math=false" in os.environ["XLA_FLAGS"].split()
""")


@pytest.fixture
def files(monkeypatch):
    """Stands for the checkpoint functions, which have tests of their own."""
    calls = []
    for name in ("save", "load"):
        call = partial(lambda name, *args, **kwargs: calls.append((name, args, kwargs)), name)
        monkeypatch.setattr(tpu_backend, f"{name}_checkpoint", call)
    return calls


def test_saving_and_loading_hand_on_model_path_and_optimizer(backend, files):
    model = mlp()
    adam = torch.optim.Adam(model.parameters())
    backend.save_model(model, "a.pth", save_optimizer=True, optimizer=adam)
    backend.save_model(model, "a.pth")
    assert backend.load_model(model, "a.pth", load_optimizer=True, optimizer=adam) is model
    config = {"config": backend.config.to_dict()}
    assert files == [
        ("save", ("a.pth", model, adam), config),
        ("save", ("a.pth", model, None), config),
        ("load", ("a.pth", model, adam), {}),
    ]


def test_an_optimizer_that_is_given_is_saved_and_loaded(backend, files):
    """It would be missed too late if it were not."""
    model = mlp()
    adam = torch.optim.Adam(model.parameters())
    backend.save_model(model, "a.pth", optimizer=adam)
    backend.load_model(model, "a.pth", optimizer=adam)
    assert [args[2] for _, args, _ in files] == [adam, adam]


def test_an_optimizer_that_is_none_is_refused(backend, files):
    with pytest.raises(TPUCheckpointError, match="save_optimizer=True, but optimizer=None"):
        backend.save_model(mlp(), "a.pth", save_optimizer=True)
    with pytest.raises(TPUCheckpointError, match="load_optimizer=True, but optimizer=None"):
        backend.load_model(mlp(), "a.pth", load_optimizer=True)
    assert files == []


def test_what_is_no_optimizer_is_refused(backend, tmp_path):
    with pytest.raises(TPUCheckpointError, match=r"optimizer of type str is invalid. Allowed: a torch\.optim\.Optim"):
        backend.save_model(mlp(), tmp_path / "a.pth", save_optimizer=True, optimizer="adam")
    assert not (tmp_path / "a.pth").exists()
