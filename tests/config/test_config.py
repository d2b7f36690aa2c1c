"""The configuration: what is stored and refused, its way through JSON, and what each field means for torch.compile."""

import copy
import dataclasses
import json
import pickle
import re

import pytest

from kp_dynamo import TPUConfigurationError, TPUDistributedError, TPUNotAvailableError
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.config.tpu_config import (
    HardwareConfig,
    KernelPyTorchConfig,
    TPUCompilationMode,
    TPUConfig,
    TPUTopology,
    TPUVersion,
)
from kp_dynamo.config.translation import chip_of, compile_arguments, compile_options, require_enabled, require_topology

NAMES = [f.name for f in dataclasses.fields(TPUConfig)]

# For each field: another value as it is stored, and what is wrong.
ANOTHER = {
    "enabled": False,
    "version": TPUVersion.V6E,
    "topology": TPUTopology.POD,
    "compilation_mode": TPUCompilationMode.XLA,
    "xla_flags": "--xla_tpu_scoped_vmem_limit_kib=65536 --a",
    "precision": "float32",
    "mixed_precision": False,
    "memory_fraction": 0.5,
    "gradient_checkpointing": False,
    "xla_optimization_level": 0,
    "enable_xla_dynamic_shapes": False,
    "cache_max_size": 7,
    "compilation_timeout_seconds": None,
    "allocation_history_retention_seconds": 60.0,
    "v6e_memory_gb": 16.0,
    "v7_memory_gb": 128.0,
    "enable_strict_validation": True,
    "monitoring_interval_seconds": 0.5,
    "monitoring_duration_seconds": 2.0,
}
WRONG = {
    "enabled": [1, None],
    "version": ["v3", 5, None, "V5E"],
    "topology": ["2x2", None],
    "compilation_mode": ["jit", None],
    "xla_flags": ["xla_x", ["--a", 3], [], "", 1],
    "precision": ["float16", None],
    "mixed_precision": ["yes"],
    "memory_fraction": [0, 1.1, "90%"],
    "gradient_checkpointing": [0],
    "xla_optimization_level": [3, -1, True, "2"],
    "enable_xla_dynamic_shapes": [None],
    "cache_max_size": [0, 1.5],
    "compilation_timeout_seconds": [0, "300"],
    "allocation_history_retention_seconds": [0, None],
    "v6e_memory_gb": [0, "32"],
    "v7_memory_gb": [-1],
    "enable_strict_validation": ["true"],
    "monitoring_interval_seconds": [0],
    "monitoring_duration_seconds": [float("inf")],
}


def test_the_tables_name_every_field():
    assert list(ANOTHER) == list(WRONG) == NAMES


@pytest.mark.parametrize(("name", "value"), ANOTHER.items())
def test_a_value_is_stored_at_construction_and_later(name, value):
    config = TPUConfig()
    assert getattr(config, name) != value
    setattr(config, name, value)
    assert getattr(config, name) == value
    assert config == TPUConfig(**{name: value})


@pytest.mark.parametrize(("name", "value"), [(name, v) for name, values in WRONG.items() for v in values])
def test_a_wrong_value_is_refused_and_the_old_one_stays(name, value):
    config, before = TPUConfig(), TPUConfig()
    with pytest.raises(TPUConfigurationError, match=rf"TPUConfig\.{name}=.* is invalid.*\. Allowed: ") as raised:
        setattr(config, name, value)
    assert isinstance(raised.value, ValueError)
    assert config == before
    with pytest.raises(TPUConfigurationError, match=name):
        TPUConfig(**{name: value})


@pytest.mark.parametrize("make", [lambda: TPUConfig(precison="float32"), lambda: setattr(TPUConfig(), "precison", 1)])
def test_an_unknown_field_names_the_nearest(make):
    with pytest.raises(TPUConfigurationError, match="TPUConfig has no 'precison'; did you mean 'precision'"):
        make()


def test_words_become_members():
    config = TPUConfig(version="v5p", topology="single", compilation_mode="torch_xla")
    assert (config.version, config.topology) == (TPUVersion.V5P, TPUTopology.SINGLE)
    assert config.compilation_mode is TPUCompilationMode.TORCH_XLA


def test_flags_may_be_a_list():
    assert TPUConfig(xla_flags=["--a=1", "--b"]).xla_flags == "--a=1 --b"


@pytest.mark.parametrize(
    ("mode", "changed"),
    [
        (None, {}),
        ("inference", {"gradient_checkpointing": False}),
        ("training", {}),
        ("development", {"enable_strict_validation": True, "xla_optimization_level": 0}),
    ],
)
def test_a_mode_is_a_preset(mode, changed):
    config = KernelPyTorchConfig(mode=mode)
    assert config.mode == mode
    assert config.hardware.tpu == TPUConfig(**changed)
    if mode:
        assert getattr(KernelPyTorchConfig, f"for_{mode}")() == config


def test_two_configurations_share_nothing():
    one, other = KernelPyTorchConfig(), KernelPyTorchConfig()
    one.hardware.tpu.cache_max_size = 3
    assert other.hardware.tpu.cache_max_size == 100
    assert one != other


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: KernelPyTorchConfig("fast"),
            "mode='fast' is invalid. Allowed: inference, training, development, None",
        ),
        (lambda: KernelPyTorchConfig(hardware=TPUConfig()), "Allowed: a HardwareConfig"),
        (
            lambda: KernelPyTorchConfig("training", hardware=HardwareConfig()),
            "both mode='training' and hardware are given",
        ),
        (
            lambda: setattr(KernelPyTorchConfig(), "mode", "bogus"),
            "mode='bogus' is invalid. Allowed: inference, training",
        ),
        (lambda: setattr(KernelPyTorchConfig(), "mode", ["training"]), r"mode=\['training'\] is invalid. Allowed"),
        (
            lambda: setattr(KernelPyTorchConfig(), "hardware", None),
            "hardware=None is invalid. Allowed: a HardwareConfig",
        ),
        (lambda: setattr(KernelPyTorchConfig(), "hardware", TPUConfig()), "Allowed: a HardwareConfig"),
        (lambda: setattr(KernelPyTorchConfig(), "hardwre", 3), "has no 'hardwre'; did you mean 'hardware'"),
        (lambda: HardwareConfig(tpu=3), "Allowed: a TPUConfig"),
        (lambda: HardwareConfig(gpu=3), "HardwareConfig has no 'gpu'"),
        (lambda: KernelPyTorchConfig.from_dict({"hardwar": {}}), "did you mean 'hardware'"),
        (lambda: KernelPyTorchConfig.from_dict({"hardware": {"gpu": {}}}), "hardware has no 'gpu'"),
        (lambda: KernelPyTorchConfig.from_dict({"hardware": {"tpu": {"cache": 1}}}), "TPUConfig has no 'cache'"),
        (
            lambda: KernelPyTorchConfig.from_dict({"hardware": {"tpu": {"version": "v9"}}}),
            "TPUConfig.version='v9' is invalid",
        ),
        (lambda: KernelPyTorchConfig.from_dict([]), r"=\[\] \(list\) is invalid. Allowed: a dict"),
        (lambda: KernelPyTorchConfig.from_dict({"hardware": None}), r"hardware=None"),
        (
            lambda: KernelPyTorchConfig.from_dict({"format": 99}),
            "format=99 of the configuration is invalid: this version reads formats up to 1",
        ),
        (lambda: KernelPyTorchConfig.from_json("{"), "is not JSON"),
        (lambda: TPUConfig.from_dict(None), "TPUConfig=None"),
    ],
)
def test_invalid_configurations_are_refused(make, message):
    with pytest.raises(TPUConfigurationError, match=message):
        make()


def test_json_brings_everything_back():
    config = KernelPyTorchConfig("training")
    for name, value in ANOTHER.items():
        setattr(config.hardware.tpu, name, value)
    twin = KernelPyTorchConfig.from_json(config.to_json())
    assert twin == config
    assert twin.to_dict() == json.loads(config.to_json())
    assert twin.hardware.tpu.version is TPUVersion.V6E


def test_an_older_file_is_read():
    """It has no format and lacks the fields that came later: they have the mode's values."""
    older = {"mode": "development", "hardware": {"tpu": {"version": "v5e", "memory_fraction": 0.8}}}
    config = KernelPyTorchConfig.from_dict(older)
    expected = TPUConfig(version="v5e", memory_fraction=0.8, enable_strict_validation=True, xla_optimization_level=0)
    assert config.hardware.tpu == expected
    assert KernelPyTorchConfig.from_dict({}) == KernelPyTorchConfig()


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c)), lambda c: eval(repr(c))])
def test_configurations_can_be_copied_and_sent(twin_of):
    config = KernelPyTorchConfig("development")
    assert twin_of(config) == config


def options(present=None, level=None, **fields):
    return compile_options(TPUConfig(**fields), level, present)


PLAIN = options()


def test_the_default_configuration_is_aggressive_and_refuses_no_graph_for_its_size():
    assert {k: v for k, v in PLAIN.items() if k != "buckets"} == {
        "level": "aggressive",
        "precision": "bfloat16",
        "cache_size": 100,
        "compile_timeout_s": 300.0,
    }
    assert not CompileOptions.from_dict(PLAIN).is_memory_bounded


# What a field changes in the options; those that mean nothing to a compiler are tested where they mean something.
MEANS = [
    ({"precision": "float32"}, {"precision": "float32"}),
    ({"mixed_precision": False}, {"precision": "float32"}),
    ({"memory_fraction": 0.5}, {"memory_fraction": 0.5}),
    ({"gradient_checkpointing": False}, {"checkpoint": "off"}),
    ({"xla_optimization_level": 0}, {"level": "conservative"}),
    ({"xla_optimization_level": 1}, {"level": "balanced"}),
    ({"cache_max_size": 7}, {"cache_size": 7}),
    ({"compilation_timeout_seconds": 20}, {"compile_timeout_s": 20.0}),
    ({"compilation_timeout_seconds": None}, {"compile_timeout_s": None}),
    ({"enable_strict_validation": True}, {"strict": True}),
    ({"version": "v5p"}, {"target": "v5p"}),
    ({"version": "v6e", "v6e_memory_gb": 20}, {"target": "v6e", "memory_budget_gb": 18.0}),
    ({"version": "v7", "v7_memory_gb": 128.0}, {"target": "v7", "memory_budget_gb": 57.6}),  # of half a chip
    ({"version": "v5e", "v7_memory_gb": 128.0}, {"target": "v5e"}),
    ({"allocation_history_retention_seconds": 1.0, "monitoring_interval_seconds": 1, "topology": "single"}, {}),
]


@pytest.mark.parametrize(("fields", "changed"), MEANS)
def test_what_a_field_means_for_torch_compile(fields, changed):
    found = options(**fields)
    assert found == {**PLAIN, **changed}
    CompileOptions.from_dict(found)


def test_a_named_level_wins_and_the_present_chip_is_the_target():
    assert options(level="balanced", xla_optimization_level=0)["level"] == "balanced"
    assert options(present="v6e")["target"] == "v6e"
    assert options(present="v6e", version="v5p")["target"] == "v5p"


@pytest.mark.parametrize(
    ("fields", "present", "name", "gb"),
    [
        ({}, None, "v5e", 16.0),
        ({}, "v6e", "v6e", 32.0),
        ({"version": "v5e"}, "v6e", "v5e", 16.0),
        ({"v6e_memory_gb": 20}, "v6e", "v6e", 20.0),
        ({"version": "v7"}, None, "v7", 192 * 2**30 / 1e9),
        ({"version": "v7", "v7_memory_gb": 128}, None, "v7", 128.0),
    ],
)
def test_which_chip_decides(fields, present, name, gb):
    chip = chip_of(TPUConfig(**fields), present)
    assert (chip.name, chip.hbm_bytes / 1e9) == (name, pytest.approx(gb))


def test_changing_lengths_are_padded_to_powers_of_two():
    assert PLAIN["buckets"] == "pow2"
    assert "buckets" not in options(enable_xla_dynamic_shapes=False)


def test_the_arguments_beside_the_options():
    usual = compile_arguments(TPUConfig())
    assert {k: usual[k] for k in ("backend", "fullgraph", "dynamic")} == {
        "backend": "kp_tpu",
        "fullgraph": False,
        "dynamic": None,
    }
    assert compile_arguments(TPUConfig(compilation_mode="xla"))["fullgraph"] is True
    assert compile_arguments(TPUConfig(enable_xla_dynamic_shapes=False))["dynamic"] is False


@pytest.mark.parametrize(("has_jax", "words"), [(True, "JAX is installed here, but"), (False, "JAX is not installed")])
def test_pjit_is_refused(monkeypatch, has_jax, words):
    monkeypatch.setattr("kp_dynamo.config.translation.find_spec", lambda name: has_jax and name == "jax")
    with pytest.raises(
        TPUConfigurationError, match=rf"PJIT is unsupported: {words}.*Allowed: TPUCompilationMode\.TORCH_XLA"
    ):
        compile_arguments(TPUConfig(compilation_mode="pjit"))


def test_a_disabled_tpu_is_not_available():
    require_enabled(TPUConfig())
    with pytest.raises(TPUNotAvailableError, match="enabled=False"):
        require_enabled(TPUConfig(enabled=False))


@pytest.mark.parametrize(
    ("topology", "processes", "devices", "is_spmd", "why"),
    [
        ("pod", 1, 1, False, "there is no other device"),
        ("pod", 1, 1, True, "there is no other device"),
        ("superpod", 1, 4, True, "this version does not support several slices"),
        ("auto", 4, 16, True, "does not support programs over the devices of several processes"),
        ("single", 2, 2, False, "does not support programs over the devices of several processes"),
        ("single", 1, 4, True, "torch_xla.runtime.use_spmd() was called"),
    ],
)
def test_devices_that_are_not_those_asked_for(topology, processes, devices, is_spmd, why):
    asked = f"topology={topology.upper()} in a job of {processes} process(es) with {devices} device(s): "
    with pytest.raises(TPUDistributedError, match=f"{re.escape(asked)}.*{re.escape(why)}.*Allowed: one process"):
        require_topology(TPUConfig(topology=topology), processes, devices, is_spmd)


@pytest.mark.parametrize(
    ("topology", "devices", "is_spmd"),
    [
        ("auto", 1, False),
        ("auto", 4, False),
        ("auto", 4, True),
        ("single", 4, False),
        ("single", 1, True),
        ("pod", 4, False),
    ],
)
def test_devices_that_are_those_asked_for(topology, devices, is_spmd):
    require_topology(TPUConfig(topology=topology), 1, devices, is_spmd)
