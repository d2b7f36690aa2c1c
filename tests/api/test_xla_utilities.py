"""`XLAUtilities`: the environment, where the time of a compilation goes, the graphs as text, flags."""

import pytest
import torch
from torch import nn

from kp_dynamo import TPUConfig, TPUConfigurationError, TPUModelPreparationError, TPUNotAvailableError, XLAUtilities
from kp_dynamo.aot.compiling import aot_compile
from kp_dynamo.api import environment
from tests.spine import counted

X = torch.randn(8, 16)


def test_the_environment():
    info = XLAUtilities.get_xla_env_info()
    assert (info["xla_available"], info["problem"], info["is_started"]) == (True, "", True)
    assert (info["device"], info["device_kind"], info["chip"]) == ("xla:0", "CPU", None)
    assert info["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert info["variables"]["PJRT_DEVICE"] == "CPU"


def test_an_environment_without_torch_xla_says_so(monkeypatch):
    def missing():
        raise TPUNotAvailableError("torch_xla is not installed")

    monkeypatch.setattr(environment, "check_versions", missing)
    info = XLAUtilities.get_xla_env_info()
    assert (info["xla_available"], info["problem"]) == (False, "torch_xla is not installed")


def test_the_time_of_a_compilation_by_stage():
    found = XLAUtilities.profile_xla_compilation(nn.Linear(16, 4), X)
    assert set(found) == {"dynamo", "aot", "passes", "trace", "xla", "run", "total"}
    assert all(seconds > 0 for seconds in found.values())
    assert sum(found.values()) - found["total"] == pytest.approx(found["total"])


def test_the_graphs_as_text_and_no_program():
    model = nn.Sequential(nn.Linear(16, 4), nn.ReLU())
    with counted() as counts:
        texts = XLAUtilities.debug_xla_graph(model, {"input": X}, TPUConfig(precision="float32"))
    assert counts.graphs == 2
    assert "torch._C._nn.linear" in texts["fx"]["1"]
    assert "linear_act" in texts["aten"]["1.forward"]
    assert "stablehlo.dot_general" in texts["stablehlo"]["1.forward"]
    assert set(texts["stablehlo"]) == set(texts["aten"]) == {"1.forward", "1.backward"}
    assert next(model.parameters()).device.type == "cpu"


def test_of_a_model_in_evaluation_mode_there_is_no_backward():
    texts = XLAUtilities.debug_xla_graph(nn.Sequential(nn.Linear(16, 4), nn.LayerNorm(4), nn.Linear(4, 2)).eval(), X)
    assert list(texts["stablehlo"]) == ["1.inference"]
    assert "bf16" in texts["stablehlo"]["1.inference"]


def test_programs_around_an_operator_on_the_cpu():
    class Eigenvalues(nn.Module):
        def forward(self, x):
            return torch.linalg.eigvals(x @ x.T).real * 2

    texts = XLAUtilities.debug_xla_graph(Eigenvalues().eval(), X)
    assert list(texts["stablehlo"]) == ["1.inference.0", "1.inference.1"]


@pytest.mark.parametrize("name", ["profile_xla_compilation", "debug_xla_graph"])
def test_what_is_refused(name):
    function = getattr(XLAUtilities, name)
    with pytest.raises(TPUModelPreparationError, match="model of type NoneType"):
        function(None, X)
    with pytest.raises(TPUConfigurationError, match="PJIT"):
        function(nn.Linear(16, 4), X, TPUConfig(compilation_mode="pjit"))


@pytest.mark.parametrize("version", ["auto", "v4", "v5e", "v5p", "v6e"])
def test_flags_fit_the_configuration(version):
    flags = XLAUtilities.optimize_xla_flags(version)
    assert all(flag.startswith("--xla_tpu_") for flag in flags), "others would go to XLA, which does not know them"
    assert TPUConfig(xla_flags=" ".join(flags)).xla_flags.split() == flags != []


def test_a_chip_on_which_no_flag_is_known_to_help():
    assert XLAUtilities.optimize_xla_flags("v7") == []
    with pytest.raises(TPUConfigurationError, match="version='v3'"):
        XLAUtilities.optimize_xla_flags("v3")


@pytest.mark.slow
def test_the_compiler_knows_the_flags_and_refuses_others(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", " ".join(XLAUtilities.optimize_xla_flags("v5e")))
    assert aot_compile(nn.Linear(128, 128).eval(), (torch.empty(8, 128),), target="v5e").modelled_ms < 1
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_nonsense=1")
    with pytest.raises(TPUNotAvailableError, match="Unknown command line flag"):
        aot_compile(nn.Linear(128, 128).eval(), (torch.empty(8, 128),), target="v5e")
