"""The cache of `compile_for_generation`: keys and values [B, H, L, D] on the device, of one length L for all requests.

B is the batch size, H the number of key heads, L the `max_length` (for Whisper's cross-attention, the length of its
encoder), and D the size of a head. transformers' `generate` sees a `RequestCache`. A program sees the layers of
`generation_layers.py`, whose tensors are its arguments.
"""

from __future__ import annotations

import contextlib
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
            return [torch.zeros(size, dtype=shape.dtype, device="cpu").to(device) for shape, size in shapes]

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
