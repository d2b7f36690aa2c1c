"""Devices, collectives in a world of one, and what is done to models for a chip."""

import pytest
import torch
from torch import nn

from kp_dynamo import (
    SPMDConfig,
    TPUConfig,
    TPUConfigurationError,
    TPUDeviceError,
    TPUDistributedError,
    TPUModelPreparationError,
    TPUNotAvailableError,
    TPUOptimizationError,
    XLACompiler,
    XLADeviceManager,
    XLADistributedTraining,
    XLAOptimizations,
    create_xla_integration,
)
from kp_dynamo.api.xla_compiler import arguments_for
from kp_dynamo.compat import xla
from tests.spine import counted


@pytest.fixture
def devices():
    return XLADeviceManager(TPUConfig())


@pytest.fixture
def distributed(devices):
    return XLADistributedTraining(devices)


@pytest.fixture
def optimizations():
    return XLAOptimizations(TPUConfig())


def test_the_three_around_one_configuration():
    config = TPUConfig()
    devices, distributed, optimizations = create_xla_integration(config)
    assert distributed.device_manager is devices
    assert devices.config is optimizations.config is config


def test_the_devices_of_a_world_of_one(devices):
    assert devices.devices == [torch.device("xla:0")] == [devices.device]
    assert (devices.world_size, devices.rank) == (1, 0)
    assert devices.set_device(0) == devices.device


@pytest.mark.parametrize("index", [1, -1, "0", True, None])
def test_a_device_that_is_not_there(devices, index):
    with pytest.raises(TPUDeviceError, match="Allowed: an int from 0 to 0"):
        devices.set_device(index)
    assert devices.device == torch.device("xla:0")


def test_device_stats(devices):
    assert devices.get_device_stats() == {
        "device": "xla:0",
        "device_kind": "CPU",
        "chip": None,
        "num_devices": 1,
        "is_spmd": False,
        "devices": ["xla:0"],
        "world_size": 1,
        "rank": 0,
        "memory": None,
    }


def test_what_is_pending_runs(devices):
    x = torch.ones(2, device=devices.device) * 3
    assert xla.xlac()._check_tensor_need_materialization([x]) == [True]
    devices.sync_all_devices()
    assert xla.xlac()._check_tensor_need_materialization([x]) == [False]


@pytest.mark.parametrize(
    ("fields", "error"),
    [({"topology": "pod"}, TPUDistributedError), ({"enabled": False}, TPUNotAvailableError)],
)
def test_what_cannot_be_had(fields, error):
    with pytest.raises(error):
        create_xla_integration(TPUConfig(**fields))


def test_a_job_of_several_processes_is_refused(monkeypatch):
    monkeypatch.setattr(xla, "world", lambda: (4, 1))
    with pytest.raises(TPUDistributedError, match=r"in a job of 4 process\(es\)"):
        XLADeviceManager(TPUConfig())


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "product"])
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_a_reduction_over_one(distributed, op, device):
    x = torch.arange(3.0, device=device)
    reduced = distributed.all_reduce(x, op=op)
    assert (reduced.tolist(), reduced is x, reduced.device) == ([0, 1, 2], False, x.device)


def test_gathering_from_one_and_waiting_for_it(distributed):
    x = torch.arange(4.0).reshape(2, 2)
    gathered = distributed.all_gather(x)
    assert torch.equal(gathered, x)
    gathered.zero_()
    assert x.sum() == 6
    distributed.barrier()
    assert not distributed.is_distributed


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda d: d.all_reduce(torch.ones(1), op="average"),
            "op='average' is invalid. Allowed: sum, mean, min, max, product",
        ),
        (lambda d: d.all_reduce([1.0]), "tensor of type list is invalid. Allowed: a torch.Tensor"),
        (lambda d: d.all_gather(3), "tensor of type int is invalid"),
        (lambda d: d.all_gather(torch.tensor(1.0)), "no dimension to gather along"),
        (lambda _: XLADistributedTraining(None), "device_manager of type NoneType"),
        (
            lambda d: XLADistributedTraining(d.device_manager, (1,)),
            r"mesh_shape=\(1,\) is invalid: programs run on one",
        ),
        (
            lambda d: XLADistributedTraining(d.device_manager, SPMDConfig((1,))),
            r"mesh_shape=SPMDConfig\(mesh_shape=\(1,\).* is invalid: programs run on one",
        ),
        (
            lambda d: d.wrap_model(nn.Linear(2, 2), sharding="fsdp"),
            "sharding='fsdp' is invalid: programs run on one device. Try: topology=POD",
        ),
    ],
)
def test_collectives_that_make_no_sense(distributed, call, message):
    with pytest.raises(TPUDistributedError, match=message):
        call(distributed)


@pytest.mark.parametrize(
    "call",
    [lambda d: d.all_reduce(torch.ones(1)), lambda d: d.all_gather(torch.ones(1)), lambda d: d.barrier(),
     lambda d: d.wrap_model(nn.Linear(2, 2))],
)  # fmt: skip
def test_collectives_over_processes_that_nothing_joins(distributed, monkeypatch, call):
    monkeypatch.setattr(xla, "world", lambda: (2, 0))
    with pytest.raises(TPUDistributedError, match=r"the job has 2 processes, but torch\.distributed has no group"):
        call(distributed)


def test_a_group_that_carries_no_tensors_of_the_cpu(distributed, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    with pytest.raises(TPUDistributedError, match=r"has a group of 'nccl'. Allowed: a group of gloo or mpi"):
        distributed.barrier()


def test_a_wrapped_model_trains_as_eager(distributed):
    model, twin = nn.Linear(4, 2), nn.Linear(4, 2)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(8, 4)
    wrapped = distributed.wrap_model(model)
    assert wrapped is model
    for module, data in ((wrapped, x.to("xla")), (twin, x)):
        sgd = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            sgd.zero_grad()
            module(data).square().sum().backward()
            for parameter in module.parameters():
                parameter.grad = distributed.all_reduce(parameter.grad, op="mean")
            sgd.step()
    torch.testing.assert_close(wrapped.weight.cpu(), twin.weight, rtol=1e-5, atol=1e-6)


def test_what_changes_no_result_is_done_and_the_rest_is_not(optimizations):
    model = nn.Sequential(nn.Linear(128, 100), nn.Dropout(0.0), nn.Dropout(0.5), nn.Linear(100, 128).double())
    model[0].weight = nn.Parameter(torch.randn(128, 100).T)
    weight = model[0].weight.clone()
    assert optimizations.optimize_model_for_xla(model) is model
    assert model[0].weight.is_contiguous()
    assert torch.equal(model[0].weight, weight)
    assert [type(model[i]) for i in (1, 2)] == [nn.Dropout, nn.Dropout]
    assert (model[0].weight.shape, model[3].weight.dtype) == ((100, 128), torch.float64)


def test_an_optimizer_keeps_the_parameters_that_become_contiguous(optimizations):
    model = nn.Linear(4, 8)
    model.weight = nn.Parameter(torch.randn(4, 8).T)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizations.optimize_model_for_xla(model)
    before = model.weight.clone()
    model(torch.ones(1, 4)).sum().backward()
    sgd.step()
    assert torch.equal(model.weight, before - 1)


def test_dropout_that_does_nothing_yet_stays(optimizations):
    """Its probability may be read by the model, as GPT-2's attention does, or be raised later."""

    class Noise(nn.Dropout):
        def forward(self, x):
            return x + 1

    model = nn.ModuleDict({"plain": nn.Dropout(0.0), "own": Noise(0.0)})
    optimizations.optimize_model_for_xla(model)
    assert (type(model["plain"]), type(model["own"])) == (nn.Dropout, Noise)
    assert model["own"](torch.zeros(1)) == 1
    model["plain"].p = 1.0
    assert model["plain"](torch.ones(3)).tolist() == [0, 0, 0]


def test_parameters_that_share_their_memory_go_on_sharing_it(optimizations):
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.detach().T)
    optimizations.optimize_model_for_xla(model)
    with torch.no_grad():
        model[0].weight.fill_(3)
    assert model[1].weight.unique().tolist() == [3]


def test_a_second_time_there_is_nothing_to_do(optimizations):
    model = nn.Linear(4, 8)
    model.weight = nn.Parameter(torch.randn(4, 8).T)
    version = optimizations.optimize_model_for_xla(model).weight._version
    assert optimizations.optimize_model_for_xla(model).weight._version == version


def test_hints_win_over_the_configuration(optimizations):
    model, x = nn.Linear(64, 64), torch.randn(8, 64)
    assert optimizations.add_compilation_hints(model, precision="float32") is model
    with torch.no_grad():
        compiled = XLACompiler(TPUConfig()).compile_model(model, x)
        assert (compiled(x) - model(x)).abs().max() < 1e-5
    with pytest.raises(TPUConfigurationError, match="option 'precison' is unknown"):
        optimizations.add_compilation_hints(model, precison="float32")


def test_hints_that_follow_from_the_model(optimizations):
    config = TPUConfig()
    frozen = optimizations.add_compilation_hints(nn.Linear(2, 2).requires_grad_(False))
    trained = optimizations.add_compilation_hints(nn.Linear(2, 2))
    assert arguments_for(frozen, config)["options"]["checkpoint"] == "off"
    assert "checkpoint" not in arguments_for(trained, config)["options"]


def test_shapes_that_change_are_captured_once(optimizations):
    model = optimizations.enable_dynamic_shapes(nn.Softmax(dim=-1))
    with torch.no_grad():
        compiled = XLACompiler(TPUConfig()).compile_model(model)
        with counted() as counts:
            results = [compiled(torch.ones(length, 4)) for length in (5, 6, 7)]
    assert counts.aot_traces == 1
    assert [r[0, 0].item() for r in results] == [0.25, 0.25, 0.25]


def test_shapes_that_the_configuration_keeps_fixed():
    with pytest.raises(TPUOptimizationError, match="enable_xla_dynamic_shapes=False"):
        XLAOptimizations(TPUConfig(enable_xla_dynamic_shapes=False)).enable_dynamic_shapes(nn.ReLU())


@pytest.mark.parametrize("name", ["optimize_model_for_xla", "add_compilation_hints", "enable_dynamic_shapes"])
def test_what_is_no_model_is_refused(optimizations, name):
    with pytest.raises(TPUModelPreparationError, match="model of type list"):
        getattr(optimizations, name)([])
