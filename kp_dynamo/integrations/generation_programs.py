"""The programs of `compile_for_generation`: one for each kind and shape of a step, called with tensors on the CPU.

Only small tensors cross between host and device: tokens, positions and masks one way, the logits of one position back.
The cache stays on the device, and each program updates it in place.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from kp_dynamo.compat import xla
from kp_dynamo.integrations.generation_cache import RequestCache
from kp_dynamo.integrations.generation_layers import PromptLayer, clear, layers_of

_numbers = itertools.count()

# The same object at each step of a request: the first copy on the device serves all steps.
_KEPT = ("encoder_outputs", "attention_mask")


def encode(encoder: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """The hidden states [B, S, E] of tokens [B, S]."""
    found: Tensor = encoder(input_ids=input_ids, attention_mask=attention_mask, return_dict=True).last_hidden_state
    return found


def encode_features(encoder: nn.Module, input_features: Tensor) -> Tensor:
    """The hidden states [B, L, E] of audio features [B, F, T]."""
    found: Tensor = encoder(input_features, return_dict=True).last_hidden_state
    return found


def score(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The logits [B, S, V] of a forward without a cache."""
    found: Tensor = model(**inputs, use_cache=False, return_dict=True).logits
    return found


def prefill(
    model: nn.Module, inputs: dict[str, Any], tensors: Sequence[Tensor], cross: Sequence[Tensor], row: Tensor
) -> Tensor:
    """The logits [B, 1, V] of token `row` of a prompt."""
    for tensor in cross:
        clear(tensor, row)
    cache = layers_of(tensors, len(inputs["cache_position"]), row, layer=PromptLayer)
    if "logits_to_keep" not in inputs:
        return _logits(model, inputs, cache, cross, 0).index_select(1, row)
    return _logits(model, {**inputs, "logits_to_keep": row}, cache, cross, 0)


def decode(
    model: nn.Module,
    inputs: dict[str, Any],
    tensors: Sequence[Tensor],
    cross: Sequence[Tensor],
    order: Tensor | None = None,
) -> Tensor:
    """The logits [B, 1, V] of one more token, after the rows of the cache were put into `order`.

    Cross-attention keeps its order: the beams of one prompt have equal rows there.
    """
    cache = layers_of(tensors, inputs["cache_position"][0], order)
    return _logits(model, inputs, cache, cross, cross[0].shape[2] if cross else 0)


def _logits(
    model: nn.Module, inputs: dict[str, Any], cache: Cache, cross: Sequence[Tensor], num_encoded: int
) -> Tensor:
    """Logits of a forward; `num_encoded` is 0 if cross-attention must compute its keys and values."""
    if cross:
        cache = EncoderDecoderCache(cache, layers_of(cross, num_encoded))
        inputs = {**inputs, "encoder_outputs": (inputs["encoder_outputs"],)}
    found: Tensor = model(**inputs, past_key_values=cache, return_dict=True).logits
    return found


class Programs:
    """Runs steps of a model on the device.

    Args:
        model: The model, with its weights on the device when a step runs.
        options: As for `torch.compile(model, backend="kp_tpu", options=options)`.
    """

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        self._model, self._options = model, dict(options)
        self._compiled: dict[tuple[object, ...], Callable[..., Tensor]] = {}
        self._kept: dict[str, tuple[object, Any]] = {}

    def encode(self, encoder: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """As the function `encode`, with arguments and result on the CPU."""
        return self._run(encode, (encoder,), _to_device({"input_ids": input_ids, "attention_mask": attention_mask}))

    def encode_features(self, encoder: nn.Module, features: Tensor) -> Tensor:
        """As the function `encode_features`, with argument and result on the CPU."""
        return self._run(encode_features, (encoder, _to_device(features)), {})

    def score(self, inputs: dict[str, Any]) -> Tensor:
        """As the function `score`, with inputs and result on the CPU."""
        return self._run(score, (self._model, _to_device(inputs)), {})

    def prefill(self, inputs: dict[str, Any], cache: RequestCache, row: int) -> Tensor:
        """As the function `prefill`, with inputs and result on the CPU."""
        return self._step(prefill, inputs, cache, torch.tensor([row], device="cpu"))

    def decode(self, inputs: dict[str, Any], cache: RequestCache) -> Tensor:
        """As the function `decode`, with inputs and result on the CPU."""
        order, cache.order = cache.order, None
        return self._step(decode, inputs, cache, order)

    def forget_request(self) -> None:
        """Free what was kept on the device for the steps of a request."""
        self._kept.clear()

    def _step(self, step: Callable[..., Tensor], inputs: dict[str, Any], cache: RequestCache, last: Any) -> Tensor:
        kept = {name: self._keep(name, inputs[name]) for name in _KEPT if name in inputs}
        moved = {**_to_device({n: v for n, v in inputs.items() if n not in kept}), **kept}
        last_argument = () if last is None else (_to_device(last),)
        return self._run(step, (self._model, moved, cache.tensors, cache.cross, *last_argument), {})

    def _keep(self, name: str, value: Any) -> Any:
        known = self._kept.get(name)
        if known is None or known[0] is not value:
            known = self._kept[name] = (value, _to_device(value))
        return known[1]

    def _run(self, step: Callable[..., Tensor], arguments: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        key = (step, _shapes_of(arguments), _shapes_of(named))
        if (run := self._compiled.get(key)) is not None:
            return xla.fetch([run(*arguments, **named)])[0]
        run = torch.compile(_with_own_code(step), backend="kp_tpu", fullgraph=True, options=self._options)
        with warnings.catch_warnings():
            # torch 2.9 warns of itself when Dynamo traces the masks of transformers; an error under `-W error`.
            warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
            logits = run(*arguments, **named)
        self._compiled[key] = run
        return xla.fetch([logits])[0]


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function. Dynamo counts recompilations, and notes sizes that vary, by the name of the code."""
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    copy = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _to_device(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(xla.device())
    if isinstance(value, dict):
        return {name: _to_device(item) for name, item in value.items()}
    return value


def _shapes_of(value: Any) -> object:
    """What must be equal for two calls to share a program. A module's own attributes are Dynamo's to check."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return tuple((name, _shapes_of(item)) for name, item in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(_shapes_of, value))
    return None if isinstance(value, nn.Module) else value
