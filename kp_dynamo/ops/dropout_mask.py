"""The mask of attention's dropout: a hash of a probability's position and of a random key, computed where it is read.

The backward computes the mask of the forward again from the key, four numbers. A mask that is saved, or random numbers
that are drawn and read by a second program, would have the size of the scores.

The hash is "lowbias32" of C. Wellons' hash-prospector: two rounds of shift, xor and multiplication, modulo 2**32. Each
row has two words of its own, so two rows with the same mask are as rare as two equal numbers of 64 bits.

    dropout_mask(key, rate, size) -> booleans [..., S, T]: True where a probability stays

is that mask for a dropout that is an operator of its own. It has no derivative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Random numbers of a key, and the bits of each: float32 numbers in [0, 1) have 24.
KEY_SIZE = 4
_KEY_BITS = 24
_FIRST, _SECOND, _STRIDE = 0x7FEB352D, -0x7B935975, -0x61C8864F  # lowbias32's factors; 2**32 over the golden ratio


@dataclass(frozen=True)
class Dropout:
    """The dropout of an attention's probabilities.

    Attributes:
        key: Random float32 numbers in [0, 1), [4]; or their node.
        rate: The share of probabilities that become 0; at least 0 and less than 1. The others are divided by 1 - rate.
        order: The sizes by which the pass `divide_heads` has ordered the heads of all sequences; () for eager's order.
    """

    key: Any
    rate: float
    order: tuple[int, ...] = ()

    def kept(self, num_heads: Any, first: int, num_queries: Any, num_keys: Any) -> Tensor:
        """Whether a probability stays: booleans, [N, S, T], for S queries from `first` on and the first T keys."""
        one, other = self._row_words(num_heads, first, num_queries)
        keys = torch.arange(num_keys, dtype=torch.int32, device=self.key.device)
        bits = keys * self._number(_STRIDE) ^ one.unsqueeze(-1)
        bits = self._folded(bits, 16) * self._number(_FIRST) ^ other.unsqueeze(-1)
        bits = self._folded(bits, 15) * self._number(_SECOND)
        # Uniform from -2**31 to 2**31 - 1. The last fold of the hash only changes lower bits.
        return bits >= self._number(min(round(self.rate * 2**32) - 2**31, 2**31 - 1))

    def _row_words(self, num_heads: Any, first: int, num_queries: Any) -> tuple[Tensor, Tensor]:
        """Two words per row, each [N, S]."""
        words = (self.key * 2.0**_KEY_BITS).to(torch.int32)
        heads = torch.arange(num_heads, dtype=torch.int32, device=self.key.device)
        if self.order:
            chips, parts, sequences, own = self.order
            heads = heads.reshape(chips, sequences, parts, own).transpose(1, 2).reshape(-1)
        queries = torch.arange(first, first + num_queries, dtype=torch.int32, device=self.key.device)
        mixed = [self._mixed(p ^ words[i]) for i, p in enumerate((heads, queries, heads, queries))]
        one, other = (self._mixed(h.unsqueeze(-1) + q * self._number(_STRIDE)) for h, q in (mixed[:2], mixed[2:]))
        return one, other

    def _mixed(self, bits: Tensor) -> Tensor:
        bits = self._folded(bits, 16) * self._number(_FIRST)
        return self._folded(self._folded(bits, 15) * self._number(_SECOND), 16)

    def _folded(self, bits: Tensor, count: int) -> Tensor:
        """`bits` xor `bits` shifted right by `count`, with zeros from the left."""
        # torch_xla 2.9 lowers the operator >> to a division, which rounds toward zero.
        shifted = torch.bitwise_right_shift(bits, self._number(count))
        return bits ^ (shifted & self._number(2 ** (32 - count) - 1))

    def _number(self, value: int) -> Tensor:
        """A number as int32: torch_xla 2.9 promotes int32 tensors and Python numbers to int64."""
        return torch.full((), value, dtype=torch.int32, device=self.key.device)


_library = torch.library.Library("kp", "FRAGMENT")
_library.define("dropout_mask(Tensor key, float rate, SymInt[] size) -> Tensor", tags=torch.Tag.pt2_compliant_tag)


def _dropout_mask(key: Tensor, rate: float, size: Sequence[Any]) -> Tensor:
    *heads, queries, keys = size
    return Dropout(key, rate).kept(math.prod(heads), 0, queries, keys).view(size)


for _device in ("CPU", "Functionalize"):  # as in `attention.py`
    _library.impl("dropout_mask", _dropout_mask, _device)
torch.library.register_fake(
    "kp::dropout_mask", lambda key, rate, size: key.new_empty(size, dtype=torch.bool), lib=_library
)
