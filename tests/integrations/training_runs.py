"""The losses of training runs of Trainer and Accelerator, for tests that need processes with other environments.

`losses_of("trainer", cases, environment)` runs them in a process of its own; `main` is what that process runs.
"""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

import torch

from tests.spine import run_script

STEPS = 20
Case = dict[str, Any]


def losses_of(library: str, cases: dict[str, Case], environment: dict[str, str]) -> dict[str, list[float]]:
    """The losses of each case by its name."""
    source = f"""
import warnings
warnings.simplefilter("ignore")
from tests.integrations.training_runs import main
main({library!r}, {cases!r})
"""
    return json.loads(run_script(source, environment, timeout_s=1500).splitlines()[-1])


def main(library: str, cases: dict[str, Case]) -> None:
    """Run the cases in order and write their losses as the last line."""
    run = {"trainer": trainer_losses, "accelerator": accelerator_losses}[library]
    with tempfile.TemporaryDirectory() as folder:
        found = {name: run(os.path.join(folder, name), **case) for name, case in cases.items()}
    print("\n" + json.dumps(found))  # noqa: T201 - the answer of the process


def llama(**changes: Any) -> torch.nn.Module:
    """A Llama of two layers with random weights, always the same."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, max_position_embeddings=64)
    heads = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changes}))


def sentences(is_ragged: bool = False) -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(64, (2 * STEPS * 4, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row[: 16 - i % 5 if is_ragged else None]} for i, row in enumerate(rows)]


def padded(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch of sentences, padded to the longest of them, with a mask and labels only if they differ in length."""
    rows = [sentence["input_ids"] for sentence in batch]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    if len({len(row) for row in rows}) == 1:
        return {"input_ids": tokens, "labels": tokens}
    is_real = tokens != -100
    return {"input_ids": tokens.where(is_real, 0), "labels": tokens, "attention_mask": is_real.long()}


def trainer_losses(
    folder: str, compiled: bool = True, resume_at: int | None = None, model: Case | None = None,
    is_ragged: bool = False, **arguments: Any,
) -> list[float]:  # fmt: skip
    """The losses of a Trainer, then those of evaluations: of two batches, and on the CPU of one and a half.

    With `resume_at`, a second Trainer continues from the checkpoint of that step.
    """
    from transformers import Trainer, TrainingArguments

    found: list[float] = []

    class Recording(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            found.append(loss.item())
            return loss

    def train(steps: int, resume: bool) -> None:
        given = dict(
            output_dir=folder, per_device_train_batch_size=4, optim="adamw_torch", learning_rate=1e-3, report_to=[],
            lr_scheduler_type="constant", save_strategy="steps", save_steps=resume_at or 10**6, disable_tqdm=True,
            max_steps=steps, per_device_eval_batch_size=4, torch_compile_backend="kp_tpu" if compiled else None,
        )  # fmt: skip
        settings = TrainingArguments(**{**given, **arguments})
        data = sentences(is_ragged)
        trainer = Recording(llama(**(model or {})), settings, data_collator=padded, train_dataset=data)
        assert type(trainer.model).__name__ == "LlamaForCausalLM"
        trainer.train(resume_from_checkpoint=resume)
        if steps == STEPS:
            # On the XLA device, a last batch that is smaller counts as much as the others, compiled or not.
            for count in (8, 6) if trainer.args.device.type == "cpu" else (8,):
                found.append(trainer.evaluate(data[:count])["eval_loss"])

    with _only_if(compiled):
        if resume_at is not None:
            train(resume_at, resume=False)
        train(STEPS, resume=resume_at is not None)
    return found


def accelerator_losses(
    folder: str, compiled: bool = True, resume_at: int | None = None, accumulate: int = 1, clip: float | None = None,
    regional: bool = False, checkpointing: bool = False,
) -> list[float]:  # fmt: skip
    """The losses of a training loop with an Accelerator. With `resume_at`, a new one continues from `load_state`."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import TorchDynamoPlugin

    found: list[float] = []

    def train(begin: int, end: int) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        plugin = TorchDynamoPlugin(backend="kp_tpu", use_regional_compilation=regional) if compiled else None
        accelerator = Accelerator(dynamo_plugin=plugin, gradient_accumulation_steps=accumulate)
        model = llama()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        loader = torch.utils.data.DataLoader(sentences()[begin * 4 : end * 4], 4, collate_fn=padded)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if begin:
            accelerator.load_state(folder)
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        if end < STEPS:
            # safetensors cannot load into a model on the XLA device.
            accelerator.save_state(folder, safe_serialization=accelerator.device.type == "cpu")

    with _only_if(compiled):
        middle = [] if resume_at is None else [resume_at]
        for begin, end in zip([0, *middle], [*middle, STEPS], strict=True):
            train(begin, end)
    return found


class _only_if:  # noqa: N801 - reads as a function
    """Inside, accelerate knows kp_tpu if the run is a compiled one; fails if such a run compiled nothing."""

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled

    def __enter__(self) -> None:
        from kp_dynamo.integrations import enable_accelerate
        from kp_dynamo.telemetry import snapshot

        if self.compiled:
            enable_accelerate(options={"precision": "float32"})
        self.captures = snapshot()["captures"]

    def __exit__(self, kind: object, *_: object) -> None:
        from kp_dynamo.integrations import disable_accelerate
        from kp_dynamo.telemetry import snapshot

        disable_accelerate()
        torch._dynamo.reset()
        if kind is None:
            # An equal model that was compiled before adds no graph.
            assert (snapshot()["captures"] > self.captures) == self.compiled
