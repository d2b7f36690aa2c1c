"""`compile_for_generation(model, max_length=...)`: transformers' `generate`, with its forwards compiled.

The result is an object of a subclass of the model's class that shares the model's modules. transformers' own loop runs
on the CPU: logits processors, stopping criteria, sampling. `GenerationHooks` replaces what that loop calls: the cache,
the encoder, and the forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast
from transformers.utils.generic import ModelOutput

from kp_dynamo.config.options import CompileOptions
from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.integrations import generation_refusals as refusals
from kp_dynamo.integrations.generation_cache import RequestCache
from kp_dynamo.integrations.generation_requests import Requests, bucket_rule


def compile_for_generation(
    model: Any,
    *,
    max_length: int,
    buckets: str | list[int] | dict[str, int] | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    """Compile the forwards of `model.generate`, for requests of up to `max_length` tokens.

    For each batch size (prompts x beams) there is one program that decodes, a second one if beam search is used, and
    one for each bucket of prompt lengths. Whisper has one for its encoder, and one that finds the language.
    A program that takes long enough is divided at its repeated layers, as with the option `blocks` everywhere.

    Args:
        model: A transformers model that generates from `input_ids`, or Whisper, on the CPU or on the XLA device. It
            stays as it is.
        max_length: The most tokens of a request, prompt and new ones; for an encoder-decoder model, of either side.
            The cache holds so many.
        buckets: The lengths that prompts are padded to, as in the option of this name. None: powers of two.
        options: As for `torch.compile(model, backend="kp_tpu", options=options)`, without `buckets` and `over_bucket`.
            `donate` is "mutated" unless given.

    Returns:
        An object with the attributes and the modules of `model`, whose `generate` uses the compiled forwards.

    Raises:
        TPUConfigurationError: An argument is invalid.
        TPUModelPreparationError: transformers has no static cache for this model.
    """
    refusals.require_versions()
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 2:
        raise TPUConfigurationError(f"max_length={max_length!r} is invalid. Allowed: an int >= 2, such as 1024.")
    refusals.require_model(model, max_length)
    chosen = {"donate": "mutated", **CompileOptions.from_dict(options).given_values()}
    if found := sorted({"buckets", "over_bucket"} & set(chosen)):
        raise TPUConfigurationError(
            f"compile_for_generation got the option {found[0]}. Allowed: all other options. "
            "Try: the argument buckets, for the lengths that prompts are padded to."
        )
    requests = Requests(model, max_length, bucket_rule(buckets, max_length), chosen)
    own = type(model)
    cls = type(own.__name__, (GenerationHooks, own), {"__module__": own.__module__, "__doc__": own.__doc__})
    compiled: Any = object.__new__(cls)
    vars(compiled).update(vars(model), _requests=requests)
    return compiled


# The model's own class comes after the hooks, but only at run time.
_Model: Any = GenerationMixin


def _without_cache(result: Any) -> Any:
    """The next request writes to the buffers of this one's cache, so no result may hold it."""
    if not isinstance(result, ModelOutput):
        return result
    return type(result)(**{name: value for name, value in result.items() if name != "past_key_values"})


class GenerationHooks(_Model):  # type: ignore[misc]
    """What replaces transformers' own methods (version 4.57) in a model from `compile_for_generation`."""

    @property
    def device(self) -> torch.device:
        """The CPU, where `generate` takes prompts and returns tokens, whatever device the weights are on."""
        return torch.device("cpu")

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own `generate`. Tensors on the XLA device are taken too; the result goes back there."""
        if kwargs.get("custom_generate") is not None:
            refusals.refuse("custom_generate", "only the forwards of transformers' own loops are compiled")
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        device = given[0].device if given else self.device
        args, kwargs = tree_map_only(Tensor, Tensor.cpu, (args, kwargs))
        with self._requests.request():
            result = super().generate(*args, **kwargs)
        return result if device.type == "cpu" else tree_map_only(Tensor, lambda t: t.to(device), result)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A compiled step of `generate`. Otherwise the model's own forward, eager."""
        cache = kwargs.get("past_key_values")
        if isinstance(cache, RequestCache):
            logits = self._requests.step(kwargs, cache)
        elif self._requests.is_running and refusals.is_audio(self):
            logits = self._requests.score(kwargs)
        else:
            return super().__call__(*args, **kwargs)
        assert not args
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        return _without_cache(super()._sample(*args, **kwargs))

    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        return _without_cache(super()._beam_search(*args, **kwargs))

    def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        config, model_kwargs = super()._prepare_generation_config(*args, **kwargs)
        refusals.require_mode(config)
        return config, model_kwargs

    def _validate_generation_mode(self, mode: GenerationMode, config: Any, given: dict[str, Any]) -> None:
        refusals.require_no_draft(given)
        super()._validate_generation_mode(mode, config, given)

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        super()._validate_model_kwargs(model_kwargs)
        refusals.require_arguments(model_kwargs)

    def _prepare_cache_for_generation(
        self, config: Any, model_kwargs: dict[str, Any], mode: GenerationMode, batch_size: int, max_cache_length: int
    ) -> None:
        refusals.require_length(max_cache_length + 1, self._requests.max_length)
        rows = max(config.num_beams, config.num_return_sequences) * batch_size
        model_kwargs["past_key_values"] = self._requests.new_cache(rows)

    def _prepare_encoder_decoder_kwargs_for_generation(
        self, inputs_tensor: Tensor, model_kwargs: dict[str, Any], *_: Any
    ) -> dict[str, Any]:
        if refusals.is_audio(self):
            hidden = self._requests.encode_features(self.get_encoder(), inputs_tensor)
            return {**model_kwargs, "encoder_outputs": BaseModelOutput(last_hidden_state=hidden)}
        mask = model_kwargs.get("attention_mask")
        mask = torch.ones_like(inputs_tensor) if mask is None else mask
        hidden, mask = self._requests.encode(self.get_encoder(), inputs_tensor, mask)
        return {**model_kwargs, "encoder_outputs": BaseModelOutput(last_hidden_state=hidden), "attention_mask": mask}

    def create_masks_for_generate(self, config: Any, attention_mask: Tensor | None, **kwargs: Any) -> Any:
        """The mask [B, S] as it is, so that the program makes the masks [B, 1, S, L] and not the CPU at every token.

        A model with masks of its own (Gemma 3) keeps them.
        """
        own = getattr(super(), "create_masks_for_generate", None)
        return attention_mask if own is None else own(config=config, attention_mask=attention_mask, **kwargs)

    def _reorder_cache(self, past_key_values: RequestCache, beam_idx: Tensor) -> RequestCache:
        past_key_values.reorder_cache(beam_idx)
        return past_key_values

    def _valid_auto_compile_criteria(self, *_: Any) -> bool:
        """False: transformers must not compile what is compiled already."""
        return False
