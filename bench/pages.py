"""`python -m bench.pages [NAME ...]`: the example pages of docs/pages, which need no TPU.

Each is the page of a report as a user gets it: nothing is edited by hand.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import kp_dynamo
from bench.workloads import gpt
from kp_dynamo.aot.difference import compare
from kp_dynamo.aot.difference_page import comparison_html

FOLDER = Path(__file__).parents[1] / "docs" / "pages"
LAYERS, WIDTH, LENGTH, BATCH = 32, 1024, 1024, 4
_WIDE = {"width": 768, "batch": 8, "length": 1024}
_TOKENS_PER_STEP = 2**17
_LLAMA = {"checkpoint": "blocks", "blocks": "on"}  # "auto" would compile 32 layers of this size as one program
logger = logging.getLogger(__name__)


class Causal(nn.Module):
    """A Llama of transformers with its loss: tokens [B, T] int64 -> loss."""

    def __init__(self, num_layers: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        config = LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=num_layers,
            num_attention_heads=16,
            num_key_value_heads=8,
            vocab_size=32000,
            use_cache=False,
        )
        self.llama = LlamaForCausalLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.llama(input_ids=tokens, labels=tokens).loss
        return loss


class Troubled(nn.Module):
    """A layer that Dynamo cannot trace at one line, and that XLA cannot lower at another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.special.erfcx(layer(x).relu())  # has no XLA lowering
        if x.abs().mean() > 1:  # breaks the graph: the branch depends on data
            x = x / 2
        return x.cumsum(0).tanh()


def _gpt_page() -> str:
    work = gpt(12, **_WIDE)
    return kp_dynamo.aot_compile(work.model, work.inputs, train=True).to_html()


def _llama_page() -> str:
    with torch.device("meta"):
        model, tokens = Causal(LAYERS), torch.empty(BATCH, LENGTH, dtype=torch.int64)
    return kp_dynamo.aot_compile(model, (tokens,), train=True, options=_LLAMA).to_html()


def _troubled_page() -> str:
    """The page of a second call, with another batch than the first."""
    model = Troubled()
    torch.compile(model, backend="kp_tpu", dynamic=False)(torch.randn(8, 256)).sum().backward()
    return kp_dynamo.explain(model, torch.randn(6, 256)).to_html()


def _plan_page() -> str:
    with torch.device("meta"):
        model, tokens = Causal(LAYERS), torch.empty(BATCH, LENGTH, dtype=torch.int64)
    search: dict[str, Any] = {"targets": ["v5e"], "max_chips": 16, "tokens_per_step": _TOKENS_PER_STEP, "tokens": 10e9}
    return kp_dynamo.plan(model, (tokens,), train=True, num_compiled=1, **search).to_html()


def _diff_page() -> str:
    """What it costs to keep attention as it is written."""
    work = gpt(2, **_WIDE)
    without = {"disable_passes": ["rewrite_attention"]}
    before, after = (kp_dynamo.aot_compile(work.model, work.inputs, train=True, options=o) for o in ({}, without))
    return comparison_html(compare(before, after, 1.05, ("with attention rewritten", "without")))


PAGES: dict[str, Callable[[], str]] = {
    "gpt": _gpt_page,
    "llama-32": _llama_page,
    "explain": _troubled_page,
    "plan": _plan_page,
    "diff": _diff_page,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", choices=[*PAGES, []], metavar="NAME", help=f"of {', '.join(PAGES)}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in parser.parse_args().names or PAGES:
        (FOLDER / f"{name}.html").write_text(PAGES[name](), encoding="utf-8")
        logger.info("docs/pages/%s.html", name)


if __name__ == "__main__":
    main()
