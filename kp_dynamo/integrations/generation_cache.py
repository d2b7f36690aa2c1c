"""The cache of `compile_for_generation`: keys and values [B, H, L, D] on the device, of one length L for all requests.

B is the batch size, H the number of key heads, L the `max_length`, and D the size of a head. transformers' `generate`
sees a `RequestCache`. A program sees `DeviceLayer`s, whose tensors are its arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticLayer

from kp_dynamo.exceptions import TPUModelPreparationError
from kp_dynamo.integrations.device_weights import substituted

# The device of the fake tensors, and whether there is a mask. Eager code reads values that fake tensors do not have:
# Falcon of a mask, GPT-2 of tokens without a mask, gpt-oss of tokens on the CPU. That one is last, because some
# operators on `xla` start the device.
_ATTEMPTS = (("cpu", False), ("cpu", True), ("xla:0", False))


class LayerShape(NamedTuple):
    """The key heads, the size of a head, and the dtype of one layer."""

    num_heads: int
    head_dim: int
    dtype: torch.dtype


class DeviceLayer(StaticLayer):
    """A layer inside a program. `num_seen` is the number of tokens that earlier calls wrote.

    transformers' own layers count the rows that are not zero. Here rows after the true length hold values of the
    padding, or of an earlier request.

    Each layer prepares its own tensors when it is updated, and not the program all of them at its start: where a
    program is divided at repeated blocks, one piece alone then reads a tensor, which may be donated to it.

    Args:
        keys: Its keys [B, H, L, D].
        values: Its values [B, H, L, D].
        num_seen: An int or a tensor.
        order: The batch rows [B] that the update continues, or None for all in order.
    """

    def __init__(self, keys: Tensor, values: Tensor, num_seen: Any, order: Tensor | None = None) -> None:
        super().__init__(max_cache_len=keys.shape[2])
        self.max_batch_size, self.num_heads, _, self.head_dim = keys.shape
        self.dtype, self.device = keys.dtype, keys.device
        self.keys, self.values, self.is_initialized = keys, values, True
        self.num_seen, self.order = num_seen, order

    def get_seq_length(self) -> Any:
        return self.num_seen

    def update(
        self, key_states: Tensor, value_states: Tensor, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.order is not None:
            for tensor in self._tensors():
                tensor.copy_(tensor.index_select(0, self.order))
        return super().update(key_states, value_states, cache_kwargs)

    def _tensors(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values


class PromptLayer(DeviceLayer):
    """A layer while a prompt of `num_tokens` is its first content: the prompt attends to itself and reads no cache.

    Args:
        keys: Its keys [B, H, L, D].
        values: Its values [B, H, L, D].
        num_tokens: The padded length of the prompt.
        row: The position [1] of its last token.
    """

    def __init__(self, keys: Tensor, values: Tensor, num_tokens: int, row: Tensor) -> None:
        super().__init__(keys, values, 0)
        self.num_tokens, self.row = num_tokens, row

    def update(
        self, key_states: Tensor, value_states: Tensor, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Clear the tensors, and write the first rows as a slice: for `index_copy_`, a v5e writes row by row."""
        for tensor, states in zip(self._tensors(), (key_states, value_states), strict=True):
            clear(tensor, self.row)
            tensor.narrow(2, 0, self.num_tokens).copy_(states)
        return key_states, value_states

    def get_mask_sizes(self, cache_position: Tensor) -> tuple[int, int]:
        return self.num_tokens, 0

    def get_max_cache_shape(self) -> int:
        return self.num_tokens


def clear(tensor: Tensor, row: Tensor) -> None:
    """Zero a tensor of the cache. NaN of an earlier request would pass through the masks, because 0 x NaN is NaN.

    `zero_` would not read the tensor. The program would then leave its buffer alone and allocate another one.
    """
    tensor.masked_fill_(row >= 0, 0)


def layers_of(tensors: Sequence[Tensor], *arguments: Any, layer: type[DeviceLayer] = DeviceLayer) -> Cache:
    """A cache inside a program, of layers `layer(keys, values, *arguments)`; `tensors` has keys and values in turn."""
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return Cache(layers=[layer(keys, values, *arguments) for keys, values in pairs])


class RequestCache(Cache):
    """The cache of one request, as `generate` sees it.

    Sliding-window layers are of full length too: the masks hold the window, so padding cannot push tokens out of it.

    Attributes:
        tensors: Keys and values of each layer in turn.
        cross: The same for the cross-attention of an encoder-decoder model; otherwise empty.
        num_seen: How many tokens the cache holds.
        order: The rows of the cache that the next step continues, in beam search; None for all in order.
    """

    def __init__(self, tensors: list[Tensor], cross: list[Tensor]) -> None:
        length = tensors[0].shape[2]
        super().__init__(layers=[StaticLayer(length) for _ in tensors[::2]])
        self.tensors, self.cross = tensors, cross
        self.num_seen = 0
        self.order: Tensor | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Leaves the work to the next step's program."""
        self.order = beam_idx.long()


class CacheShapes(NamedTuple):
    """The layers of a model's cache; `cross` is empty if the model has no encoder."""

    own: tuple[LayerShape, ...]
    cross: tuple[LayerShape, ...]

    def allocate(self, batch: int, length: int, encoded_length: int, device: torch.device) -> RequestCache:
        """Zeros on the device, copied from the CPU: `torch.zeros` there would compile a program for each shape."""

        def zeros(part: tuple[LayerShape, ...], rows: int) -> list[Tensor]:
            shapes = [(shape, (batch, shape.num_heads, rows, shape.head_dim)) for shape in part for _ in range(2)]
            return [torch.zeros(size, dtype=shape.dtype).to(device) for shape, size in shapes]

        return RequestCache(zeros(self.own, length), zeros(self.cross, encoded_length))


class _OneTokenLayer(StaticLayer):
    def __init__(self) -> None:
        super().__init__(max_cache_len=1)


class _OneToken(Cache):
    """Grows by a layer when the model writes one. Nothing of it depends on values."""

    is_compileable = True

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=_OneTokenLayer)

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return 1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def cache_shapes(model: nn.Module) -> CacheShapes:
    """The shapes of a model's cache, from a forward of one token with fake tensors.

    Raises:
        TPUModelPreparationError: The model does not write one static cache entry a layer.
    """
    try:
        for device, has_mask in _ATTEMPTS[:-1]:
            with contextlib.suppress(DataDependentOutputException, DynamicOutputShapeException):
                return _shapes_of_one_token(model, torch.device(device), has_mask)
        device, has_mask = _ATTEMPTS[-1]
        return _shapes_of_one_token(model, torch.device(device), has_mask)
    except Exception as cause:
        raise TPUModelPreparationError(
            f"{type(model).__name__} cannot use a static cache: one token with fake tensors failed with "
            f"{type(cause).__name__}: {cause}. Allowed: models that generate with cache_implementation='static'."
        ) from cause


def _shapes_of_one_token(model: Any, device: torch.device, has_mask: bool) -> CacheShapes:
    own, cross = _OneToken(), _OneToken()
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), substituted(model, partial(_fake, device)):
        token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        mask = torch.ones_like(token) if has_mask else None
        given: dict[str, Any] = {"input_ids": token, "attention_mask": mask, "past_key_values": own}
        if model.config.is_encoder_decoder:
            # The encoder writes no cache, and it may read both in eager.
            hidden = torch.zeros(1, 1, model.config.hidden_size, dtype=model.dtype, device=device)
            given = {"decoder_input_ids": token, "encoder_outputs": (hidden,)}
            given["past_key_values"] = EncoderDecoderCache(own, cross)
        model(**given, cache_position=token[0], use_cache=True)
    return CacheShapes(_shapes(own), _shapes(cross))


def _fake(device: torch.device, tensor: Tensor) -> Tensor:
    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(fake, requires_grad=False) if isinstance(tensor, nn.Parameter) else fake


def _shapes(cache: Cache) -> tuple[LayerShape, ...]:
    written = [layer.keys for layer in cache.layers if layer.keys is not None]
    return tuple(LayerShape(keys.shape[1], keys.shape[3], keys.dtype) for keys in written)
