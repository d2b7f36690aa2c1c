"""`python -m bench.generate`: transformers' `generate` on XLA:CPU, from a new process to the last token.

A Llama of width 1024 with 8 layers, float32, B 1, a prompt of 32 tokens and 64 new ones, greedy. Stock is the same
model on the XLA device, with `torch.compile(model.forward, backend="openxla")` and a static cache. A second request
with a prompt of another length follows in the same process. Programs are all that XLA compiled, torch_xla's own too.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from bench import report
from bench.decoding_step import INTERMEDIATE, NUM_HEADS, NUM_KEY_HEADS, NUM_LAYERS, NUM_TOKENS, WIDTH
from bench.timing import in_fresh_process
from bench.workloads import SEED

PROMPT, OTHER_PROMPT, NUM_NEW, MAX_LENGTH = 32, 27, 64, 128
LIMIT = 0.5
STOCK, OURS = "stock openxla", "compile_for_generation"
TITLE = (
    f"generate: Llama of width {WIDTH}, {NUM_LAYERS} layers, float32, B 1, prompt {PROMPT}, {NUM_NEW} new tokens, "
    "on XLA:CPU; one run of each in a new process"
)


def measure(variant: str, width: int = WIDTH) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=width * INTERMEDIATE // WIDTH, num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KEY_HEADS, num_hidden_layers=NUM_LAYERS, vocab_size=NUM_TOKENS,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    prompts = [torch.randint(1, NUM_TOKENS, (1, length)) for length in (PROMPT, OTHER_PROMPT)]
    return {STOCK: _stock, OURS: _ours}[variant](model, prompts)


def _stock(model: Any, prompts: list[torch.Tensor]) -> dict[str, Any]:
    import torch_xla

    model = model.to(torch_xla.device())
    model.forward = torch.compile(model.forward, backend="openxla")
    return _requests(model, [prompt.to(torch_xla.device()) for prompt in prompts], cache_implementation="static")


def _ours(model: Any, prompts: list[torch.Tensor]) -> dict[str, Any]:
    import kp_dynamo

    made = kp_dynamo.compile_for_generation(model, max_length=MAX_LENGTH, options={"precision": "float32"})
    return _requests(made, prompts)


def _requests(model: Any, prompts: list[torch.Tensor], **mode: Any) -> dict[str, Any]:
    import torch_xla.debug.metrics as metrics

    seconds, sums = [], 0
    for prompt in prompts:
        start = time.perf_counter()
        sums += int(model.generate(prompt, max_new_tokens=NUM_NEW, do_sample=False, **mode).cpu().sum())
        seconds.append(time.perf_counter() - start)
    compiled = metrics.counter_value("UncachedCompile") or 0
    return {"first request s": seconds[0], "second request s": seconds[1], "programs": compiled, "sum of tokens": sums}


def main() -> None:
    argparse.ArgumentParser(prog="bench.generate", description=__doc__).parse_args()
    rows = [{"variant": variant, **in_fresh_process("bench.generate", variant=variant)} for variant in (OURS, STOCK)]
    ours, stock = (row["first request s"] for row in rows)
    target = report.Target("seconds of the first request over stock", ours / stock, LIMIT)
    print(f"\n{TITLE}\n\n{report.table(rows)}\n\n  {target}")


if __name__ == "__main__":
    main()
