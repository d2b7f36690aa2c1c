"""The cache of `compile_for_generation` as a program sees it: layers of keys and values [B, H, L, D].

B is the batch size, H the number of key heads, L the `max_length`, and D the size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, StaticLayer


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
