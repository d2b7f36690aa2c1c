"""The zoo: small models with random weights, built from the configurations of transformers, diffusers and timm.

Two layers and widths of 64 to 128, so that each compiles in seconds on two cores. Every dropout is
off, because a random mask of the backend's own is no error (dropout has tests of its own).

Legend: B batch, S sequence length.
"""

from __future__ import annotations

from functools import partial

import timm
import torch
import transformers
from torch import nn

from tests.zoo.language_models import LANGUAGE_MODELS
from tests.zoo.other_models import OTHER_MODELS
from tests.zoo.zoo_model import VOCAB, B, Inputs, S, ZooModel, decoder, pixels, tokens

__all__ = ["BY_NAME", "ZOO", "Inputs", "ZooModel"]


def _encoder(kind: str) -> nn.Module:
    """BERT or RoBERTa with the head of masked language modelling, tied to the embedding."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForMaskedLM")(config)


def _deberta() -> nn.Module:
    """Attention by relative positions, the far ones in buckets by a logarithm: 7 is at the edge of one."""
    config = transformers.DebertaV2Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
        relative_attention=True, position_buckets=6, pos_att_type=["p2c", "c2p"], share_att_key=True,
        norm_rel_ebd="layer_norm", position_biased_input=False, max_relative_positions=8,
    )  # fmt: skip
    return transformers.DebertaV2ForMaskedLM(config)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=64, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0, use_cache=False
    )
    return transformers.T5ForConditionalGeneration(config)


def _t5_inputs() -> Inputs:
    return {**tokens(mask=True), "decoder_input_ids": torch.randint(3, VOCAB, (B, S - 2))}


def _vision(**more: object) -> dict[str, object]:
    return dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=32,
        patch_size=8, attention_dropout=0.0, **more,
    )  # fmt: skip


def _vit() -> nn.Module:
    config = transformers.ViTConfig(**_vision(), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.ViTForImageClassification(config)


def _clip() -> nn.Module:
    text = dict(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, attention_dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=VOCAB - 1,
    )  # fmt: skip
    config = transformers.CLIPConfig(text_config=text, vision_config=_vision(), projection_dim=64)
    return transformers.CLIPModel(config)


def _whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=VOCAB, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=16, max_source_positions=24,
        max_target_positions=64, use_cache=False, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def _whisper_inputs() -> Inputs:
    return {"input_features": torch.randn(B, 16, 48), "decoder_input_ids": torch.randint(3, VOCAB, (B, S))}


_TIMM_VIT = dict(img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4, num_classes=10)
_TIMM_CONVNEXT = dict(depths=(1, 1, 2, 1), dims=(16, 32, 64, 128), num_classes=10)

ZOO = (
    ZooModel("llama", partial(decoder, "Llama"), partial(tokens, mask=True)),
    ZooModel("qwen3", partial(decoder, "Qwen3", head_dim=16), tokens),
    ZooModel("mistral", partial(decoder, "Mistral", sliding_window=8), tokens),
    ZooModel("gpt2", _gpt2, tokens),
    ZooModel("bert", partial(_encoder, "Bert"), partial(tokens, mask=True)),
    ZooModel("roberta", partial(_encoder, "Roberta"), partial(tokens, mask=True)),
    ZooModel("deberta", _deberta, partial(tokens, mask=True)),
    # Scores without a scale, and ReLUs: of one seed the gradients' error over autocast's is 0.65 to 1.24, of six 0.91.
    ZooModel("t5", _t5, _t5_inputs, num_seeds=6),
    # It gives four numbers: of one seed their error over autocast's is 0.56 to 3.1 at balanced, of ten 0.93.
    ZooModel("vit", _vit, partial(pixels, 32), num_seeds=10),
    # Of one seed, the gradients' error over autocast's is 0.87 to 1.13 at aggressive, 0.85 to 1.03 at balanced.
    ZooModel("clip", _clip, lambda: {**tokens(mask=True), **pixels(32)}, num_seeds=6),
    ZooModel("gemma2", partial(decoder, "Gemma2", head_dim=16, sliding_window=8), tokens),
    ZooModel("mixtral", partial(decoder, "Mixtral", num_local_experts=4), tokens, breaks=True),
    ZooModel("whisper", _whisper, _whisper_inputs, breaks=True),
    ZooModel(
        "resnet18",
        partial(timm.create_model, "resnet18", num_classes=10),
        partial(pixels, 64, "x", 4),
        num_seeds=6,
    ),
    ZooModel("convnext", partial(timm.models.convnext.ConvNeXt, **_TIMM_CONVNEXT), partial(pixels, 64, "x")),
    ZooModel(
        "timm_vit", partial(timm.models.vision_transformer.VisionTransformer, **_TIMM_VIT), partial(pixels, 32, "x")
    ),
    *LANGUAGE_MODELS,
    *OTHER_MODELS,
)

BY_NAME = {model.name: model for model in ZOO}
