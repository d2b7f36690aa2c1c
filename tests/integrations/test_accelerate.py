"""accelerate: the name of the backend, where its options come from, and what training computes."""

import copy
import logging
import os
import pickle

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend, TorchDynamoPlugin

from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.integrations import disable_accelerate, enable_accelerate
from tests.integrations.training_runs import STEPS, losses_of
from tests.spine import counted, run_script


def options_of(**plugin):
    return TorchDynamoPlugin(backend="kp_tpu", **plugin).to_kwargs()


def test_the_name_is_valid_while_the_integration_is_enabled():
    names, before = DynamoBackend.list(), [dict(vars(of)) for of in (DynamoBackend, TorchDynamoPlugin, Accelerator)]
    with pytest.raises(ValueError, match="'KP_TPU' is not a valid DynamoBackend"):
        Accelerator(dynamo_backend="kp_tpu")
    enable_accelerate()
    enable_accelerate()
    assert Accelerator(dynamo_backend="kp_tpu").state.dynamo_plugin.to_kwargs() == {"backend": "kp_tpu"}
    assert DynamoBackend.list() == [*names, "KP_TPU"]
    disable_accelerate()
    disable_accelerate()
    assert DynamoBackend.list() == names
    assert [dict(vars(of)) for of in (DynamoBackend, TorchDynamoPlugin, Accelerator)] == before
    with pytest.raises(ValueError, match="'KP_TPU' is not a valid DynamoBackend"):
        TorchDynamoPlugin(backend="kp_tpu")


def test_the_member_is_like_the_others():
    enable_accelerate()
    member = DynamoBackend("KP_TPU")
    assert member is DynamoBackend.KP_TPU is DynamoBackend["KP_TPU"] is pickle.loads(pickle.dumps(member))
    assert copy.deepcopy(member) is member
    assert isinstance(member, str)
    assert (str(member), member.name, member.value, member == "KP_TPU") == ("KP_TPU", "KP_TPU", "KP_TPU", True)
    assert repr(member) == "<DynamoBackend.KP_TPU: 'KP_TPU'>"
    assert {member: 1}[DynamoBackend.KP_TPU] == 1
    assert TorchDynamoPlugin(backend=member).to_kwargs() == {"backend": "kp_tpu"}


def test_an_import_of_the_integrations_changes_nothing():
    source = """
import sys, kp_dynamo.integrations
assert not {"accelerate", "torch", "torch_xla"} & set(sys.modules)
from accelerate.utils import DynamoBackend
print("KP_TPU" in DynamoBackend.list())
"""
    assert run_script(source, {"USE_TORCH_XLA": "0"}).strip() == "False"


def test_each_source_of_options_overrides_the_one_before(monkeypatch):
    monkeypatch.setenv("KP_TPU_OPTIONS", '{"level": "conservative", "precision": "float32", "strict": true}')
    enable_accelerate(options={"level": "aggressive", "fuse": False})
    assert options_of()["options"] == {"level": "aggressive", "precision": "float32", "strict": True, "fuse": False}
    given = {"fuse": True, "cache_size": 7}
    merged = {"level": "aggressive", "precision": "float32", "strict": True, "fuse": True, "cache_size": 7}
    assert options_of(options=given)["options"] == merged
    assert given == {"fuse": True, "cache_size": 7}


def test_the_last_call_gives_the_options_of_later_plugins(monkeypatch):
    monkeypatch.setenv("KP_TPU_OPTIONS", '{"strict": true}')
    enable_accelerate(options={"fuse": False})
    first = TorchDynamoPlugin(backend="kp_tpu")
    monkeypatch.setenv("KP_TPU_OPTIONS", " ")
    enable_accelerate(options={"level": "aggressive"})
    assert first.to_kwargs()["options"] == {"strict": True, "fuse": False}
    assert options_of()["options"] == {"level": "aggressive"}


def test_other_backends_get_no_options(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "max-autotune")
    enable_accelerate(options={"level": "aggressive"})
    assert TorchDynamoPlugin(backend="inductor").to_kwargs() == {"backend": "inductor", "mode": "max-autotune"}
    assert TorchDynamoPlugin().backend == DynamoBackend.NO


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{level: 1}", r"KP_TPU_OPTIONS='{level: 1}' is invalid: it is not JSON \(.*\). Allowed: a JSON object"),
        ('["level"]', r"KP_TPU_OPTIONS=.* is invalid: it is a JSON list. Allowed: a JSON object of options. Try: KP_"),
        ("null", "it is a JSON NoneType"),
        ('{"levle": "balanced"}', "KP_TPU_OPTIONS: option 'levle' is unknown; did you mean 'level'?"),
        ('{"level": "fast"}', "KP_TPU_OPTIONS: option level='fast' is invalid"),
    ],
)
def test_bad_options_in_the_environment_raise_at_the_call(monkeypatch, text, message):
    monkeypatch.setenv("KP_TPU_OPTIONS", text)
    with pytest.raises(TPUConfigurationError, match=message):
        enable_accelerate(options={"level": "balanced"})
    assert "KP_TPU" not in DynamoBackend.list()


def test_bad_options_raise_where_they_are_given():
    with pytest.raises(TPUConfigurationError, match="option 'levle' is unknown"):
        enable_accelerate(options={"levle": "balanced"})
    with pytest.raises(TPUConfigurationError, match=r"options='level' .str. is invalid"):
        enable_accelerate(options="level")
    assert "KP_TPU" not in DynamoBackend.list()
    enable_accelerate()
    with pytest.raises(TPUConfigurationError, match="option 'mode' is unknown"):
        options_of(options={"mode": "reduce-overhead"})
    with pytest.raises(TPUConfigurationError, match=r"options=.'level'. .list. is invalid"):
        options_of(options=["level"])


def test_the_names_of_a_compiled_model_in_prepare():
    """On XLA, accelerate without the integration looks up "weight" among the names `_orig_mod.weight`."""
    enable_accelerate()
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    accelerator = Accelerator(dynamo_backend="kp_tpu")
    _, prepared = accelerator.prepare(model, optimizer)
    assert {id(p) for group in prepared.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}


def test_a_call_that_fails_keeps_the_options_of_the_last_one(monkeypatch):
    enable_accelerate(options={"strict": True})
    with pytest.raises(TPUConfigurationError):
        enable_accelerate(options={"level": "fast"})
    assert options_of()["options"] == {"strict": True}


def test_the_filter_of_guards_goes_to_torch():
    enable_accelerate(options={"strict": True})
    keep_all = lambda guards: [True for _ in guards]  # noqa: E731
    assert options_of(options={"guard_filter_fn": keep_all})["options"] == {"strict": True, "guard_filter_fn": keep_all}


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_mode_and_options_go_together(mode, monkeypatch):
    enable_accelerate(options={"strict": True})
    assert options_of(mode=mode) == {"backend": "kp_tpu", "options": {"strict": True}}
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", mode)
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "1")
    expected = {"backend": "kp_tpu", "fullgraph": True, "options": {"strict": True}}
    assert options_of() == expected


def test_other_modes_raise_by_name(monkeypatch):
    enable_accelerate()
    with pytest.raises(TPUConfigurationError, match="mode='max-autotune' is invalid: it is a mode of Inductor"):
        Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="kp_tpu", mode="max-autotune"))
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "max-autotune")
    with pytest.raises(TPUConfigurationError, match="mode='max-autotune' is invalid"):
        Accelerator(dynamo_backend="kp_tpu")


def test_settings_that_accelerate_ignores_are_a_warning(caplog):
    enable_accelerate()
    Accelerator()
    Accelerator(dynamo_backend="kp_tpu")
    (record,) = [r for r in caplog.records if r.name.startswith("kp_dynamo") and r.levelno == logging.WARNING]
    assert "keeps the compile settings of the first Accelerator of a process (backend='no')" in record.getMessage()
    caplog.clear()
    AcceleratorState._reset_state()
    for _ in range(2):
        Accelerator(dynamo_backend="kp_tpu")
    assert [r for r in caplog.records if r.levelno == logging.WARNING] == []


@pytest.mark.parametrize("before", [None, "no", "kp_tpu"])
def test_disabling_restores_the_variable_that_a_trainer_sets(before, monkeypatch):
    if before is None:
        monkeypatch.delenv("ACCELERATE_DYNAMO_BACKEND", raising=False)
    else:
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", before)
    enable_accelerate()
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "kp_tpu"  # as TrainingArguments does
    assert TorchDynamoPlugin().to_kwargs() == {"backend": "kp_tpu"}
    disable_accelerate()
    assert os.environ.get("ACCELERATE_DYNAMO_BACKEND") == before


def test_disabling_keeps_what_somebody_else_chose(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    enable_accelerate()
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "inductor"
    disable_accelerate()
    assert os.environ["ACCELERATE_DYNAMO_BACKEND"] == "inductor"


def test_a_prepared_model_stays_compiled():
    enable_accelerate(options={"precision": "float32"})
    model = torch.nn.Linear(4, 4)
    with counted() as count:
        prepared = Accelerator(dynamo_backend="kp_tpu").prepare(model)
        disable_accelerate()
        x = torch.randn(2, 4)
        found = prepared(x.to(prepared.weight.device)).cpu()
    assert count.graphs + count.capture_hits >= 1
    weight, bias = model.weight.cpu(), model.bias.cpu()
    # float32 sums of five terms round 1e-7 of their size at a time.
    torch.testing.assert_close(found, x @ weight.T + bias, rtol=1e-6, atol=1e-6)


# Of 20 steps: the loss, the gradients and so each step of AdamW round 1e-7 of their size some hundred times.
TOLERANCE = dict(rtol=1e-5, atol=0)
CASES = {
    "plain": {},
    "resumed": {"resume_at": 10},
    "accumulated": {"accumulate": 4, "clip": 0.5},
    "checkpointed": {"checkpointing": True},
    "regional": {"regional": True},
}
EAGER = {f"{name} eager": {**case, "compiled": False, "regional": False} for name, case in CASES.items()}


@pytest.mark.slow
@pytest.mark.timeout(3600)  # two processes, each with many trainings
def test_twenty_steps_lose_as_eager_does():
    """On the CPU, where the backend copies the model, and on the XLA device, to which accelerate moves it."""
    on_cpu = losses_of("accelerator", {**CASES, **EAGER}, {"USE_TORCH_XLA": "0"})
    on_xla = losses_of("accelerator", CASES, {"USE_TORCH_XLA": "1"})
    for name in CASES:
        expected = torch.tensor(on_cpu[f"{name} eager"])
        assert len(expected) == STEPS
        for found in (on_cpu, on_xla):
            torch.testing.assert_close(
                torch.tensor(found[name]), expected, **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
            )
