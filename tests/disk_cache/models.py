"""Models that a process trains for two steps; what they compute is compared between processes, bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def trained(name: str, device: str) -> str:
    """SHA-256 of the results, the gradients and the buffers of a model, in training and in inference."""
    torch._dynamo.reset()  # another model in the same code would make Dynamo assume sizes that vary
    torch.manual_seed(0)
    model, inputs, output = MODELS[name]()
    model.to(device).train()
    given = [x.to(device) for x in inputs]
    run = torch.compile(lambda *x: output(model, *x), backend="kp_tpu", options={"precision": "float32"})
    results = []
    for _ in range(2):
        results.append(run(*given))
        results[-1].square().mean().backward()
    model.eval()
    with torch.no_grad():
        results.append(run(*given))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return _digest([*results, *gradients, *model.buffers(), torch.rand(1)])


def _digest(tensors: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


Made = tuple[nn.Module, tuple[Tensor, ...], Callable[..., Any]]


def _call(model: nn.Module, *inputs: Tensor) -> Any:
    return model(*inputs)


def _dropout() -> Made:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 4)), (torch.randn(4, 8),), _call


def _images() -> Made:
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(2)
    model, images = nn.Sequential(*layers), torch.randn(2, 3, 10, 10)
    model(images)
    return model, (images,), _call


def _tied() -> Made:
    embedding, head = nn.Embedding(16, 8), nn.Linear(8, 16)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.Tanh(), head), (torch.randint(16, (2, 5)),), _call


def _t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )  # fmt: skip
    tokens = torch.randint(64, (2, 8))
    return T5ForConditionalGeneration(config), (tokens,), lambda model, x: model(input_ids=x, labels=x).loss


def _resnet() -> Made:
    import timm

    return timm.create_model("resnet18", num_classes=10), (torch.randn(2, 3, 64, 64),), _call


def _llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    tokens = torch.randint(64, (2, 8))
    return LlamaForCausalLM(config), (tokens,), lambda model, x: model(input_ids=x, labels=x, use_cache=False).loss


MODELS: dict[str, Callable[[], Made]] = {
    "dropout": _dropout, "images": _images, "tied": _tied, "t5": _t5, "resnet": _resnet, "llama": _llama,
}  # fmt: skip
