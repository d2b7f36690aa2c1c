"""The requests of a model from `compile_for_generation`: their weights, caches and padded lengths, one at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kp_dynamo.buckets.sizes import Buckets
from kp_dynamo.compat import xla
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.integrations import generation_refusals as refusals
from kp_dynamo.integrations.device_weights import DeviceWeights
from kp_dynamo.integrations.generation_cache import RequestCache, cache_shapes
from kp_dynamo.integrations.generation_padding import pad_columns, pad_encoded, pad_prompt
from kp_dynamo.integrations.generation_programs import Programs

# While a request runs, the modules of a CPU model hold weights on the device. Several requests may share modules.
_ONE_AT_A_TIME = threading.RLock()

_DECODER_START = Buckets("pow2")


def bucket_rule(buckets: Any, max_length: int) -> Buckets:
    """The padded lengths of prompts.

    Raises:
        TPUConfigurationError: `buckets` is invalid, or has a bucket over `max_length`.
    """
    chosen = CompileOptions.from_dict({"buckets": "pow2" if buckets is None else buckets}).buckets
    assert chosen is not None
    rule = Buckets(chosen, over="error")
    if rule.sizes is not None and rule.sizes[-1] > max_length:
        raise TPUConfigurationError(
            f"buckets={buckets!r} is invalid: {rule.sizes[-1]} is over max_length={max_length}. "
            "Allowed: buckets up to max_length."
        )
    return rule


class Requests:
    """Runs the requests of one model."""

    def __init__(self, model: nn.Module, max_length: int, buckets: Buckets, options: dict[str, Any]) -> None:
        self.max_length, self._buckets = max_length, buckets
        config: Any = model.config
        self._has_encoder = bool(config.is_encoder_decoder)
        self._encoded_length = config.max_source_positions if refusals.is_audio(model) else max_length
        self._shapes, self._dtype = cache_shapes(model), model.dtype
        self._weights, self._programs = DeviceWeights(model), Programs(model, options)
        self._model = model
        self._last: RequestCache | None = None
        self.is_running = False

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """The time of one `generate`."""
        with _ONE_AT_A_TIME, _plain_tensors():
            if self.is_running:
                refusals.refuse("a call within generate of the same object", "its cache is in use")
            self.is_running = True
            try:
                with self._weights.in_place():
                    yield
            except BaseException:
                self._last = None  # a program that failed may have lost the buffers that it was given
                raise
            finally:
                self.is_running = False
                self._programs.forget_request()

    def new_cache(self, batch: int) -> RequestCache:
        """The cache of a request of `batch` rows. It reuses the buffers of the last request if that had as many."""
        last, self._last = self._last, None
        if self._model.dtype != self._dtype:  # model.bfloat16() since the last request
            last, self._shapes, self._dtype = None, cache_shapes(self._model), self._model.dtype
        if last is not None and last.tensors[0].shape[0] == batch:
            self._last = RequestCache(last.tensors, last.cross)
        else:
            del last  # frees the device memory before more is allocated
            self._last = self._shapes.allocate(batch, self.max_length, self._encoded_length, xla.device())
        return self._last

    def encode(self, encoder: nn.Module, input_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states [B, L, E] of prompts [B, S], and the mask [B, L] of their tokens."""
        refusals.require_tokens(self._model, input_ids)
        refusals.require_length(input_ids.shape[1], self.max_length)
        size = self._buckets.size_for(input_ids.shape[1], self.max_length)
        hidden = self._programs.encode(encoder, pad_columns(input_ids, size), pad_columns(mask, size))
        return pad_encoded(hidden, self.max_length), pad_columns(mask, self.max_length)

    def encode_features(self, encoder: nn.Module, features: Tensor) -> Tensor:
        """The hidden states [B, L, E] of audio [B, F, T], whose lengths are the model's own."""
        return self._programs.encode_features(encoder, features)

    def step(self, given: dict[str, Any], cache: RequestCache) -> Tensor:
        """The logits [B, 1, V] after the tokens of a forward, all on the CPU."""
        inputs = _tensors_of(given)
        tokens = inputs["decoder_input_ids" if self._has_encoder else "input_ids"]
        logits = self._decode(inputs, cache) if cache.num_seen else self._prefill(inputs, tokens, cache)
        cache.num_seen += tokens.shape[1]
        return logits

    def score(self, given: dict[str, Any]) -> Tensor:
        """The logits [B, S, V] of a forward without a cache, on the CPU. Whisper finds the language by one."""
        return self._programs.score(_tensors_of(given))

    def _prefill(self, inputs: dict[str, Any], tokens: Tensor, cache: RequestCache) -> Tensor:
        refusals.require_tokens(self._model, tokens)
        length = tokens.shape[1]
        rule = _DECODER_START if self._has_encoder else self._buckets
        size = rule.size_for(length, self.max_length)
        padded = self._with_columns(pad_prompt(inputs, size - length), size)
        return self._programs.prefill(padded, cache, length - 1)

    def _decode(self, inputs: dict[str, Any], cache: RequestCache) -> Tensor:
        return self._programs.decode(self._with_columns(inputs, self.max_length), cache)

    def _with_columns(self, inputs: dict[str, Any], length: int) -> dict[str, Any]:
        """The mask [B, S] of the tokens as [B, length]; that of an encoder has its length."""
        name = "decoder_attention_mask" if self._has_encoder else "attention_mask"
        mask = inputs.get(name)
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            return inputs
        return {**inputs, name: pad_columns(mask, length)}


def _tensors_of(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward, without those that a program sets by itself."""
    own = ("past_key_values", "return_dict", "use_cache")
    inputs = {name: value for name, value in given.items() if value is not None and name not in own}
    if "encoder_outputs" in inputs:
        inputs["encoder_outputs"] = inputs["encoder_outputs"].last_hidden_state
    return inputs


@contextlib.contextmanager
def _plain_tensors() -> Iterator[None]:
    """Without autograd. Tensors of inference mode could not be written to by a later request."""
    with torch.inference_mode(False), torch.no_grad():
        yield
