"""Models as they are in transformers, timm and diffusers, for a v5e's compiler: float32, on the meta device.

Width 1024 and two layers, so that the boundary of layers counts, with about 2048 tokens; ConvNeXt and ResNet have their
own sizes. A model of language trains with its own loss, the others with a loss as their training scripts write it.
Dropout is the library's default, 0.1 in GPT-2, BERT and T5, unless the case says "no dropout". In inference the model
returns logits. Shapes: B batch, S length, V tokens of the vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.decoding_step import DecodingStep, PromptStep, decoding_step
from bench.workloads import Workload

WIDTH, NUM_HEADS, NUM_LAYERS = 1024, 16, 2
MANY_TOKENS = 128256
"""The vocabulary of Llama 3."""
IN_PLACE = (("donate", "mutated"),)

Made = tuple[nn.Module, dict[str, Tensor]]


class Called(nn.Module):
    """A model of transformers, called with named tensors; gives its loss in training, else its logits."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], result: str, **fixed: object) -> None:
        super().__init__()
        self.model, self.names, self.result, self.fixed = model, names, result, fixed

    def forward(self, *values: Tensor) -> Tensor:
        found = self.model(**dict(zip(self.names, values, strict=True)), **self.fixed)
        return getattr(found, self.result)


class Trained(nn.Module):
    """A model [B, ...] -> prediction with the loss of its training script; `inputs` and the target -> the loss."""

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *inputs: Tensor) -> Tensor:
        *given, target = inputs
        return self.loss(self.model(*given), target)


@dataclass(frozen=True)
class Case:
    """A line of the benchmark.

    Attributes:
        name: What it is called in the table.
        make: Whether it trains -> the model and its inputs.
        modes: "infer" and "train", or one of them.
        options: Options of kp_tpu beside the level.
        stock: As `make`, for openxla; None if both run the same.
    """

    name: str
    make: Callable[[bool], Workload]
    modes: tuple[str, ...] = ("infer", "train")
    options: tuple[tuple[str, Any], ...] = ()
    stock: Callable[[bool], Workload] | None = None

    def workload(self, train: bool, is_stock: bool = False) -> Workload:
        make = self.stock if is_stock and self.stock else self.make
        with torch.device("meta"):
            return make(train)


def _integers(*size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int64)


def _called(model: nn.Module, train: bool, labels: Tensor, /, **inputs: Tensor) -> Workload:
    """A model of transformers with its labels in training."""
    if train:
        inputs["labels"] = labels
    return Workload(Called(model, tuple(inputs), "loss" if train else "logits"), tuple(inputs.values()))


def _decoder(train: bool, family: str, size: tuple[int, int] = (4, 512), **config: Any) -> Workload:
    import transformers

    sizes = dict(hidden_size=WIDTH, num_attention_heads=NUM_HEADS, num_key_value_heads=8, use_cache=False)
    given = {**sizes, "num_hidden_layers": NUM_LAYERS, "vocab_size": 32000, **config}
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**given))
    return _called(model, train, _integers(*size), input_ids=_integers(*size))


def _llama(train: bool) -> Workload:
    return _decoder(train, "Llama", intermediate_size=2816)


def _llama_many_tokens(train: bool) -> Workload:
    return _decoder(train, "Llama", (4, 1024), intermediate_size=2816, vocab_size=MANY_TOKENS)


def _qwen3(train: bool) -> Workload:
    return _decoder(train, "Qwen3", intermediate_size=3072, head_dim=128)


def _mixtral(train: bool) -> Workload:
    return _decoder(train, "Mixtral", intermediate_size=3584)


def _gpt2(train: bool, **config: float) -> Workload:
    from transformers import GPT2Config, GPT2LMHeadModel

    given = GPT2Config(n_embd=WIDTH, n_head=NUM_HEADS, n_layer=NUM_LAYERS, use_cache=False, **config)
    return _called(GPT2LMHeadModel(given), train, _integers(2, 1024), input_ids=_integers(2, 1024))


def _bert(train: bool, **config: float) -> Workload:
    """BERT's masked tokens, with padding."""
    from transformers import BertConfig, BertForMaskedLM

    given = BertConfig(
        hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_attention_heads=NUM_HEADS, num_hidden_layers=NUM_LAYERS,
        **config,
    )  # fmt: skip
    tokens = _integers(4, 512)
    return _called(BertForMaskedLM(given), train, tokens, input_ids=tokens, attention_mask=_integers(4, 512))


def _t5(train: bool, **config: float) -> Workload:
    """Two layers of the encoder and two of the decoder, with gated GELU as in T5 1.1."""
    from transformers import T5Config, T5ForConditionalGeneration

    given = T5Config(
        d_model=WIDTH, d_kv=64, d_ff=2816, num_layers=NUM_LAYERS, num_heads=NUM_HEADS, use_cache=False,
        feed_forward_proj="gated-gelu", decoder_start_token_id=0, **config,
    )  # fmt: skip
    inputs = {} if train else {"decoder_input_ids": _integers(4, 512)}
    return _called(T5ForConditionalGeneration(given), train, _integers(4, 512), input_ids=_integers(4, 512), **inputs)


def _vit(train: bool) -> Workload:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_attention_heads=NUM_HEADS, num_hidden_layers=NUM_LAYERS,
        num_labels=1000,
    )  # fmt: skip
    return _called(ViTForImageClassification(config), train, _integers(8), pixel_values=torch.empty(8, 3, 224, 224))


def _trained(model: nn.Module, train: bool, inputs: tuple[Tensor, ...], target: Tensor, loss: Any) -> Workload:
    return Workload(Trained(model, loss), (*inputs, target)) if train else Workload(model, inputs)


def _timm(train: bool, name: str, **config: Any) -> Workload:
    import timm

    images = torch.empty(8, 3, 224, 224)
    return _trained(timm.create_model(name, **config), train, (images,), _integers(8), F.cross_entropy)


def _convnext(train: bool) -> Workload:
    """The widths of ConvNeXt-B, two blocks a stage."""
    return _timm(train, "convnext_base", depths=(2, 2, 2, 2))


def _resnet50(train: bool) -> Workload:
    return _timm(train, "resnet50")


class WhisperEncoder(nn.Module):
    """Spectrograms [B, 80, 3000] -> [B, 1500, D]."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import WhisperConfig
        from transformers.models.whisper.modeling_whisper import WhisperEncoder as Encoder

        config = WhisperConfig(
            d_model=WIDTH, encoder_layers=NUM_LAYERS, encoder_attention_heads=NUM_HEADS, encoder_ffn_dim=4 * WIDTH
        )
        self.encoder = Encoder(config)

    def forward(self, spectrograms: Tensor) -> Tensor:
        return self.encoder(spectrograms).last_hidden_state


def _whisper(train: bool) -> Workload:
    return _trained(WhisperEncoder(), train, (torch.empty(2, 80, 3000),), torch.empty(2, 1500, WIDTH), F.mse_loss)


class UnetBlock(nn.Module):
    """The first block of Stable Diffusion 1.5's UNet: images [B, 320, 64, 64], times and text -> the same, halved."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers.models.unets.unet_2d_blocks import CrossAttnDownBlock2D

        self.block = CrossAttnDownBlock2D(320, 320, 1280, num_layers=2, num_attention_heads=8, cross_attention_dim=768)

    def forward(self, images: Tensor, times: Tensor, text: Tensor) -> Tensor:
        return self.block(images, times, text)[0]


def _unet(train: bool) -> Workload:
    inputs = torch.empty(2, 320, 64, 64), torch.empty(2, 1280), torch.empty(2, 77, 768)
    return _trained(UnetBlock(), train, inputs, torch.empty(2, 320, 32, 32), F.mse_loss)


class Dit(nn.Module):
    """Two layers of DiT-XL/2: latents [B, 4, 32, 32], times and classes [B] -> noise and variance [B, 8, 32, 32]."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import DiTTransformer2DModel

        self.model = DiTTransformer2DModel(num_layers=NUM_LAYERS, out_channels=8)

    def forward(self, latents: Tensor, times: Tensor, classes: Tensor) -> Tensor:
        return self.model(latents, times, classes).sample


def _dit(train: bool) -> Workload:
    inputs = torch.empty(8, 4, 32, 32), _integers(8), _integers(8)
    return _trained(Dit(), train, inputs, torch.empty(8, 8, 32, 32), F.mse_loss)


def _no_dropout(make: Callable[..., Workload], *rates: str) -> Callable[[bool], Workload]:
    return lambda train: make(train, **dict.fromkeys(rates, 0.0))


def _decode(batch: int, length: int) -> Case:
    """One token of a Llama of 8 layers in bfloat16; the caches are updated in place."""
    name = f"Llama, 8 layers, decode, B {batch}, cache {length}"
    return Case(name, lambda _: decoding_step(batch, length), ("infer",), IN_PLACE)


def _prefill(batch: int) -> Case:
    """Prompts of 512 tokens for the same model, and a cache of 2048."""
    name = f"Llama, 8 layers, prefill 512, B {batch}, cache 2048"
    stock, ours = (partial(_prompts, batch, step) for step in (DecodingStep, PromptStep))
    return Case(name, ours, ("infer",), IN_PLACE, stock)


def _prompts(batch: int, step: type[DecodingStep], _: bool) -> Workload:
    return decoding_step(batch, 2048, 512, step)


CASES = (
    Case("Llama, V 32000", _llama),
    Case("Llama, V 128256, B 4, S 1024", _llama_many_tokens),
    Case("Qwen3", _qwen3),
    Case("Mixtral", _mixtral),
    Case("GPT-2, B 2, S 1024", _gpt2),
    Case("GPT-2, no dropout", _no_dropout(_gpt2, "resid_pdrop", "embd_pdrop", "attn_pdrop"), ("train",)),
    Case("BERT", _bert),
    Case("BERT, no dropout", _no_dropout(_bert, "hidden_dropout_prob", "attention_probs_dropout_prob"), ("train",)),
    Case("T5", _t5),
    Case("T5, no dropout", _no_dropout(_t5, "dropout_rate"), ("train",)),
    Case("ViT, B 8", _vit),
    Case("ConvNeXt, B 8", _convnext),
    Case("ResNet-50, B 8", _resnet50),
    Case("Whisper's encoder, B 2", _whisper),
    Case("UNet block, B 2, 64 x 64", _unet),
    Case("DiT, B 8", _dit),
    _prefill(1),
    _prefill(8),
    _prefill(64),
    _decode(1, 2048),
    _decode(1, 8192),
    _decode(8, 2048),
    _decode(64, 2048),
    _decode(64, 512),
)
BY_NAME = {case.name: case for case in CASES}
