"""The Trainer of transformers: 20 steps through kp_tpu lose as eager's do; what its defaults do beside torch_xla."""

import os

import pytest
import torch
from accelerate.utils import TorchDynamoPlugin
from transformers import Trainer, TrainingArguments

from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.integrations import enable_accelerate
from tests.integrations.training_runs import STEPS, llama, losses_of, padded, sentences

# Of 20 steps: the loss, the gradients and so each step of AdamW round 1e-7 of their size some hundred times.
TOLERANCE = dict(rtol=1e-5, atol=0)
CASES = {
    "plain": {},
    "resumed": {"resume_at": 10},
    "ragged": {"is_ragged": True},
    "accumulated": {"gradient_accumulation_steps": 2},
    "tied": {"model": {"tie_word_embeddings": True}, "torch_compile_mode": "reduce-overhead"},
    "checkpointed": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "checkpointed, reentrant": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}


def _eager(case):
    return {**{name: value for name, value in case.items() if name != "torch_compile_mode"}, "compiled": False}


@pytest.mark.slow
@pytest.mark.timeout(3600)  # two processes, each with many trainings
def test_twenty_steps_lose_as_eager_does():
    """On the CPU, where the backend copies the model, and on the XLA device, to which the Trainer moves it."""
    eager = {f"{name} eager": _eager(case) for name, case in CASES.items()}
    on_cpu = losses_of("trainer", {**CASES, **eager}, {"USE_TORCH_XLA": "0"})
    on_xla = losses_of("trainer", CASES, {"USE_TORCH_XLA": "1"})
    for name, case in CASES.items():
        expected = torch.tensor(on_cpu[f"{name} eager"])
        assert len(expected) == STEPS * case.get("gradient_accumulation_steps", 1) + 2  # and two evaluations
        for found, evaluations in ((on_cpu[name], 2), (on_xla[name], 1)):
            wanted = expected[: len(expected) - 2 + evaluations]
            torch.testing.assert_close(torch.tensor(found), wanted, **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_bf16_loses_as_eager_autocast_does():
    """Steps of AdamW differ by the rounding of bfloat16, 2 ** -8, in gradients; a loss of 4 by far less."""
    on_cpu = {"bf16": True, "use_cpu": True}
    cases = {"eager": {**on_cpu, "compiled": False}, "compiled": on_cpu}
    losses = losses_of("trainer", cases, {"USE_TORCH_XLA": "0"})
    losses |= losses_of("trainer", {"on xla": {"bf16": True}}, {"USE_TORCH_XLA": "1"})
    wanted = torch.tensor(losses["eager"])
    for name in ("compiled", "on xla"):
        found = torch.tensor(losses[name])
        torch.testing.assert_close(found, wanted[: len(found)], rtol=2**-9, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_an_unknown_mode_raises_before_training(tmp_path):
    enable_accelerate()
    arguments = TrainingArguments(
        str(tmp_path), torch_compile_backend="kp_tpu", torch_compile_mode="max-autotune", report_to=[]
    )
    with pytest.raises(TPUConfigurationError, match="mode='max-autotune' is invalid"):
        Trainer(llama(), arguments, data_collator=padded, train_dataset=sentences())


def test_the_variable_that_training_arguments_set(tmp_path):
    """The pitfall of the page: they outlive the Trainer."""
    enable_accelerate(options={"strict": True})
    TrainingArguments(str(tmp_path), torch_compile_backend="kp_tpu", report_to=[])
    assert os.environ["ACCELERATE_DYNAMO_BACKEND"] == "kp_tpu"
    assert TorchDynamoPlugin().to_kwargs() == {"backend": "kp_tpu", "options": {"strict": True}}


@pytest.mark.slow
def test_the_default_optimizer_is_refused_beside_torch_xla(tmp_path):
    """The pitfall of the page. If it is gone, so may the line there."""
    enable_accelerate()
    arguments = TrainingArguments(str(tmp_path), torch_compile_backend="kp_tpu", report_to=[], max_steps=1)
    with pytest.raises(RuntimeError, match="`fused=True` requires all the params to be floating point Tensors"):
        Trainer(llama(), arguments, data_collator=padded, train_dataset=sentences()).train()
