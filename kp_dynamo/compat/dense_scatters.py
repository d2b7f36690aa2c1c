"""The variable that makes torch_xla scatter on a TPU as elsewhere. It reads it once, at its first scatter."""

from __future__ import annotations

import os

FACTOR = "XLA_DENSE_SCATTER_FACTOR"


def turn_off() -> None:
    """Set the variable, unless the user did. Does not import torch_xla.

    On a TPU, torch_xla 2.9 compares all indices with all places, unless there are over 100 times as many places. This
    form starts products and extremes from 0. If the index has the shape of the tensor, it writes 0 to the places that
    no index names. A factor of 0 leaves it only tensors without elements.
    """
    os.environ.setdefault(FACTOR, "0")
