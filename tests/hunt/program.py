"""A program as data: source text, inputs of every call, and the configuration it is compiled in.

Sizes differ between calls; everything else of an input stays. Values follow from the program's seed, are drawn in
float32 on the CPU, and are the same in every run. `FLOAT` and `HALF` in a source are dtypes that the float64
reference replaces by its own.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.hunt.configuration import Configuration

MODES = {
    # name: (training, grad mode)
    "train": (True, "grad"),
    "eval": (False, "grad"),
    "no_grad": (False, "no_grad"),
    "no_grad_train": (True, "no_grad"),
    "inference": (False, "inference"),
}


@dataclass(frozen=True)
class Input:
    """One argument of the program.

    Attributes:
        name: Of the parameter of `forward`.
        dtype: As torch names it: "float32", "int64".
        values: A recipe of `values.py`: "normal", "below 10", "large 1000 1".
        shapes: One for each call.
        varying: Dimensions that are marked as varying where the configuration has buckets.
        requires_grad: In calls that have a backward.
        layout: "contiguous", "transposed", "offset", a view into a larger tensor, or "overlapping": of the rows of
            `same_as`, whose layout is "offset", and the row before them, all but the last.
        is_kept: All calls get the same tensor, which keeps what was written to it.
        same_as: Another input that it is the same tensor as, or overlaps.
    """

    name: str
    dtype: str
    values: str
    shapes: tuple[tuple[int, ...], ...]
    varying: tuple[int, ...] = ()
    requires_grad: bool = False
    layout: str = "contiguous"
    is_kept: bool = False
    same_as: str | None = None


@dataclass(frozen=True)
class Program:
    """One source with its calls in one configuration.

    Attributes:
        source: Defines `Model`, an `nn.Module`.
        inputs: In the order of the parameters of `forward`.
        modes: One of `MODES` for each call.
        seed: Of weights and values.
        num_random: So many results at the end are what random operators returned, in their order.
        optimizer: An expression of `parameters`, stepped after each backward.
        families: Where its statements come from.
        configuration: How it is compiled.
    """

    source: str
    inputs: tuple[Input, ...]
    modes: tuple[str, ...]
    seed: int
    num_random: int
    optimizer: str | None
    families: tuple[str, ...]
    configuration: Configuration

    @property
    def identity(self) -> str:
        """Equal for equal programs."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=8).hexdigest()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Program:
        fields = json.loads(text)
        inputs = tuple(
            Input(**{**i, "shapes": tuple(map(tuple, i["shapes"])), "varying": tuple(i["varying"])})
            for i in fields["inputs"]
        )
        configuration = Configuration.from_dict(fields["configuration"])
        lists = {name: tuple(fields[name]) for name in ("modes", "families")}
        return Program(**{**fields, **lists, "inputs": inputs, "configuration": configuration})

    def with_source(self, source: str) -> Program:
        return replace(self, source=source)


def namespace(floating: torch.dtype | None) -> dict[str, Any]:
    """What a source may name; `floating` replaces every floating-point dtype."""
    return {
        "torch": torch,
        "nn": nn,
        "F": F,
        "math": math,
        "FLOAT": floating or torch.float32,
        "HALF": floating or torch.bfloat16,
        "FLOAT16": floating or torch.float16,
    }
