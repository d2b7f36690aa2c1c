"""The models that are trained on eight devices and on one: their batches, and the shardings that apply to each.

All activations are smooth: a ReLU near zero flips on rounding, and after twenty steps that is no longer small. Eager
PyTorch with the rows of its batches in another order trains torchvision's ResNet-18 to losses 2% apart, with SiLU to
losses 2e-7 apart.

Legend: B batch, S sequence length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torchvision.models import resnet18

from tests.sharding.registry import BOTH, DATA

B, S, VOCAB = 8, 16, 128
WIDE = {"data": 2, "model": 4}
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model, and how it is divided.

    Attributes:
        make: Makes it, equal at each call, on the CPU in float32.
        batch: The keyword arguments of a step, by its number and the number of rows.
        shardings: A mesh and a sharding by name.
        example: Arguments for `shard` from a batch, for a model that brings no plan of its own.
        lr: Learning rate of AdamW.
    """

    make: Callable[[], nn.Module]
    batch: Callable[..., Batch]
    shardings: dict[str, tuple[dict[str, int], Any]]
    example: Callable[[Batch], tuple[Any, ...]] | None = None
    lr: float = 1e-3


def _seeded(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def _tokens(step: int, rows: int = B, length: int = S) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=_seeded(step))


def _mask(step: int, rows: int = B) -> torch.Tensor:
    """Of sequences of 5 to S tokens, then padding."""
    lengths = torch.randint(5, S + 1, (rows, 1), generator=_seeded(step))
    return (torch.arange(S) < lengths).long()


def _causal(step: int, rows: int = B) -> Batch:
    ids = _tokens(step, rows)
    return {"input_ids": ids, "labels": ids}


def _repeated(step: int, rows: int = B) -> Batch:
    """The same batch in each step: the tokens of an expert are a size, and another one compiles dozens of programs."""
    return _causal(0, rows)


def _masked(step: int, rows: int = B) -> Batch:
    """One token in four is to be found; padding has no label."""
    ids, mask = _tokens(step, rows), _mask(step, rows)
    hidden = (torch.rand(rows, S, generator=_seeded(step)) < 0.25) & mask.bool()
    hidden[:, 0] = True
    labels = torch.where(hidden, ids, -100)
    return {"input_ids": torch.where(hidden, 2, ids), "attention_mask": mask, "labels": labels}


def _pairs_of_sequences(step: int, rows: int = B) -> Batch:
    labels = _tokens(step + 1000, rows, 9)
    labels[:, 7:] = torch.where(torch.rand(rows, 2, generator=_seeded(step)) < 0.5, -100, labels[:, 7:])
    return {"input_ids": _tokens(step, rows), "attention_mask": _mask(step, rows), "labels": labels}


def _images(step: int, rows: int = B) -> Batch:
    step += 20  # without ties in the pooling, which float32 alone sees
    x = torch.randn(rows, 3, 64, 64, generator=_seeded(step))
    return {"x": x, "labels": torch.randint(0, 10, (rows,), generator=_seeded(step))}


def _decoder(kind: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=2, use_cache=False)
    heads = dict(num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=32)
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **heads, **changes})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def _gpt2(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=128, n_layer=2, n_head=4, use_cache=False,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def _t5() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


@dataclass
class _Loss:
    loss: torch.Tensor


class _Classifier(nn.Module):
    """torchvision's ResNet-18 with ELU, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = resnet18(num_classes=10)
        for module in list(self.net.modules()):
            if hasattr(module, "relu"):
                module.relu = nn.ELU()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> _Loss:
        return _Loss(F.cross_entropy(self.net(x), labels))


class _Plain(nn.Module):
    """A model of nobody's library: attention with biases, and a gated MLP whose weights are parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norms = nn.Embedding(128, 128), nn.ModuleList(nn.LayerNorm(128) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(128, 128) for _ in range(4))
        self.up, self.gate = (nn.Parameter(torch.randn(128, 256) * 0.05) for _ in range(2))
        self.down, self.head = nn.Parameter(torch.randn(256, 128) * 0.05), nn.Linear(128, 128)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> _Loss:
        x = self.embed(input_ids)
        h = self.norms[0](x)
        q, k, v = (lin(h).unflatten(-1, (4, -1)).transpose(1, 2) for lin in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        logits = self.head(x + (F.silu(h @ self.gate) * (h @ self.up)) @ self.down)
        return _Loss(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


# GPT-2 has queries, keys and values in one weight, which is no pair of matmuls. Its head is the embedding.
_GPT2_TENSOR = {
    "transformer.h.*.attn.c_attn": "colwise",
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
    "lm_head": "colwise",
}
_GPT2_BOTH = {
    "transformer.h.*.attn.c_attn.weight": ("data", "model"),
    "transformer.h.*.attn.c_proj.weight": ("model", "data"),
    "transformer.h.*.mlp.c_fc.weight": ("data", "model"),
    "transformer.h.*.mlp.c_fc.bias": ("model",),
    "transformer.h.*.mlp.c_proj.weight": ("model", "data"),
    "transformer.wte.weight": ("model", "data"),
}
_FILTERS = {f"net.layer*.*.conv{i}.weight": ("model", "data", None, None) for i in (1, 2)}

_EACH = {"data": (DATA, "data"), "fsdp": (DATA, "fsdp")}
_PAIRS = {**_EACH, "tensor": (BOTH, "tensor"), "both": (WIDE, "fsdp+tensor")}

MODELS: dict[str, Case] = {
    "llama": Case(partial(_decoder, "Llama"), _causal, _PAIRS),
    "llama_tied": Case(partial(_decoder, "Llama", tie_word_embeddings=True), _causal, {"both": _PAIRS["both"]}),
    "llama_grouped": Case(partial(_decoder, "Llama", num_key_value_heads=2), _causal, {"tensor": _PAIRS["tensor"]}),
    "llama_cut": Case(  # each chip has half a head of the queries, and a quarter of the one of keys and values
        partial(_decoder, "Llama", num_attention_heads=2, num_key_value_heads=1), _causal, {"tensor": (WIDE, "tensor")}
    ),
    "gpt2": Case(
        _gpt2, _causal,
        {**_EACH, "tensor": (BOTH, _GPT2_TENSOR), "both": (WIDE, _GPT2_BOTH), "pairs": _PAIRS["both"]},
        lambda batch: (batch["input_ids"],),
    ),
    "plain": Case(
        _Plain, _causal, {"pairs": ({"model": 2, "data": 4}, "tensor")},
        lambda batch: (batch["input_ids"], batch["labels"]),
    ),
    "bert": Case(_bert, _masked, _PAIRS, lambda batch: (batch["input_ids"], batch["attention_mask"])),
    "t5": Case(
        _t5, _pairs_of_sequences, _PAIRS,
        lambda batch: (batch["input_ids"], batch["attention_mask"], batch["labels"].clamp(min=0)),
    ),
    "mixtral": Case(partial(_decoder, "Mixtral", num_local_experts=4), _repeated, _PAIRS),
    "resnet18": Case(_Classifier, _images, {**_EACH, "both": (WIDE, _FILTERS)}, lr=1e-4),
}  # fmt: skip

GPT2_WITH_DROPOUT = Case(partial(_gpt2, 0.2), _causal, {"fsdp": (DATA, "fsdp"), "both": (WIDE, _GPT2_BOTH)})
