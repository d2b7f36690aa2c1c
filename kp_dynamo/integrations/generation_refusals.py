"""What `compile_for_generation` refuses: models when it is called, arguments when `generate` is."""

from __future__ import annotations

from importlib import metadata
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin

from kp_dynamo.compat.versions import earlier_version
from kp_dynamo.exceptions import TPUConfigurationError, TPUModelPreparationError, TPUValidationError

_MINOR = "4.57"
_MODES = {GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE}
_TENSORS = {"input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask", "token_type_ids"}


def require_versions() -> None:
    """Raise unless the installed libraries are those that this code is written for."""
    version = metadata.version("transformers")
    if not version.startswith(f"{_MINOR}."):
        raise TPUConfigurationError(
            f"transformers {version} is installed; compile_for_generation is written for {_MINOR}. "
            f'Try: pip install "transformers=={_MINOR}.*".'
        )
    if (version := earlier_version() or "") != "":
        raise TPUConfigurationError(
            f'torch_xla {version} is installed; compile_for_generation needs 2.9. Try: pip install "torch_xla==2.9.*".'
        )


def require_model(model: Any, max_length: int) -> None:
    """Raise unless `generate` of this model can be compiled for `max_length` tokens."""
    given = type(model).__name__
    if isinstance(model, torch._dynamo.OptimizedModule) or getattr(model, "_compiled_call_impl", None) is not None:
        raise TPUConfigurationError(
            f"compile_for_generation got a {given} that is compiled already. Allowed: a model that torch.compile and "
            "compile_blocks have not seen. Try: give the model before it is compiled."
        )
    if not (isinstance(model, nn.Module) and isinstance(model, GenerationMixin)):
        raise TPUConfigurationError(
            f"compile_for_generation got {given}. Allowed: a transformers model with `generate`. "
            "Try: model.get_base_model() of a peft model."
        )
    if problem := _why_no_static_cache(model):
        raise TPUModelPreparationError(
            f"{given} cannot be compiled for generation: {problem}. Try: torch.compile(model.forward, "
            "backend='kp_tpu'), with `generate` of the model itself."
        )
    name = "max_target_positions" if is_audio(model) else "max_position_embeddings"
    positions = getattr(model.config, name, None)
    if positions is not None and max_length > positions:
        raise TPUConfigurationError(
            f"max_length={max_length} is invalid: {given} has {positions} positions "
            f"(config.{name}). Allowed: at most {positions}."
        )


def is_audio(model: Any) -> bool:
    """Whether it is Whisper: the prompt is features of audio, and its encoder takes one length only."""
    return bool(model.config.model_type == "whisper" and model.config.is_encoder_decoder)


def _why_no_static_cache(model: Any) -> str:
    if not getattr(model, "_can_compile_fullgraph", False) or not model._supports_default_dynamic_cache():
        return "transformers has no static cache for it that compiles (`_can_compile_fullgraph` is False)"
    if model.main_input_name != "input_ids" and not is_audio(model):
        return f"its prompt is {model.main_input_name}; allowed are input_ids, and the input_features of Whisper"
    if (attention := model.config._attn_implementation) not in ("sdpa", "eager", None):
        return f"its attention is {attention!r}; allowed are 'sdpa' and 'eager' (model.set_attn_implementation)"
    return ""


def require_mode(config: Any) -> None:
    """Raise for a way of generating, or a setting of it, that the compiled steps do not serve."""
    if config.prompt_lookup_num_tokens is not None:
        refuse("prompt_lookup_num_tokens", "drafts from the prompt need a cache that shrinks")
    if (mode := config.get_generation_mode()) not in _MODES:
        refuse(mode.value, "the mode is unsupported", "greedy search, sampling, beam search, and both")
    refused = {
        "use_cache=False": config.use_cache is False,
        f"cache_implementation={config.cache_implementation!r}": config.cache_implementation not in (None, "static"),
        "prefill_chunk_size": config.prefill_chunk_size is not None,
        "compile_config": config.compile_config is not None,
        "guidance_scale": config.guidance_scale not in (None, 1),
        "return_legacy_cache": bool(config.return_legacy_cache),
        "output_attentions": bool(config.output_attentions),
        "output_hidden_states": bool(config.output_hidden_states),
    }
    for name, is_given in refused.items():
        if is_given:
            refuse(name, "the compiled steps run one model with a static cache, and return logits only")


def require_no_draft(given: dict[str, Any]) -> None:
    """Raise for arguments of `generate` that bring in another model or other processes."""
    if given.get("assistant_model") is not None:
        refuse("assistant_model", "drafts of an assistant model need a cache that shrinks")
    if given.get("synced_gpus"):
        refuse("synced_gpus", "each process generates by itself")


def require_arguments(model_kwargs: dict[str, Any]) -> None:
    """Raise for an argument of the model that the steps would not pad right."""
    for name, value in model_kwargs.items():
        if name == "past_key_values" and value is not None:
            refuse(name, "every request starts with an empty cache", "the whole conversation as the prompt")
        if not isinstance(value, Tensor | list | tuple | dict) or name in _TENSORS:
            continue
        refuse(name, "no rule says how to pad it", ", ".join(sorted(_TENSORS)))


def require_tokens(model: Any, tokens: Tensor) -> None:
    """Raise for a token that is not in the embedding: XLA would read another one."""
    size = model.get_input_embeddings().num_embeddings
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
        raise TPUValidationError(
            f"input_ids hold tokens from {int(tokens.min())} to {int(tokens.max())}. Allowed: 0 to {size - 1}."
        )


def require_length(length: int, max_length: int) -> None:
    """Raise if a request is longer than the cache."""
    if length > max_length:
        raise TPUConfigurationError(
            f"this request has up to {length} tokens, prompt and new ones, over max_length={max_length}. "
            "Try: a smaller max_new_tokens, a shorter prompt, or compile_for_generation with a larger max_length."
        )


def refuse(name: str, reason: str, allowed: str = "leave it out") -> NoReturn:
    """Raise for an argument of `generate`."""
    raise TPUConfigurationError(
        f"generate got {name}, which a model from compile_for_generation does not take: {reason}. "
        f"Allowed: {allowed}. Try: generate of the model itself."
    )
