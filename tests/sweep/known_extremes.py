"""Operators that differ from eager at some kinds of values (see `extremes.KINDS`), each with its reason.

A listed kind that is right fails the test, so that the list only says what is true.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """At which kinds of values an operator differs from eager, and why."""

    reason: str
    kinds: frozenset[str]


_INFINITE = ("inf", "-inf")
_MEAN = "the mean of infinities is infinite; eager's running mean of a variance is NaN"


_ALL = ("inf", "-inf", "nan", "zero", "huge", "tiny", "mean")
_REFUSED = "refused, with its gradient: a value decides a shape"
_NO_GRADIENT = "a norm of order 0 has no gradient under any backend of torch 2.9"


def _differs(reason: str, *kinds: str) -> Difference:
    return Difference(reason, frozenset(kinds))


KNOWN_EXTREMES: dict[str, Difference] = {
    "cdist": _differs("p = 0 counts a NaN as a difference", *_INFINITE, "nan"),
    "cholesky": _differs("XLA's own factorisation; eager gives the infinity back", "inf"),
    "dist": _differs("powers of tiny differences underflow; eager accumulates in float64", "tiny"),
    "index_put": _differs(_REFUSED, *_ALL),
    "linalg.norm.subgradients_at_zero": _differs(_NO_GRADIENT, *_ALL),
    "linalg.pinv.singular": _differs("products of powers beyond float32 on the way", "huge", "tiny"),
    "linalg.svdvals": _differs("the vectors of a singular value of 0 are not unique, nor is its gradient", "zero"),
    "logit": _differs("eager's scalar kernel has another gradient of NaN than its vectors", "nan"),
    "narrow": _differs(_REFUSED, *_ALL),
    "native_layer_norm": _differs(_MEAN, *_INFINITE),
    "nn.functional.hardswish": _differs("eager's scalar kernel has another gradient of NaN than its vectors", "nan"),
    "nn.functional.interpolate.linear": _differs("infinity times a weight of 0", *_INFINITE),
    "nn.functional.max_pool2d": _differs("the gradient of a window with a NaN goes nowhere", "nan"),
    "nn.functional.multi_margin_loss": _differs("eager leaves a NaN out", "nan"),
    "nn.functional.rms_norm": _differs("a gradient that cancels: eager's first digit is wrong as well", "huge"),
    "norm": _differs(_NO_GRADIENT, *_ALL),
    "std_mean.unbiased": _differs(_MEAN, *_INFINITE),
    "topk": _differs("equal elements have places of their own", *_INFINITE, "nan", "zero"),
    "var_mean.unbiased": _differs(_MEAN, *_INFINITE),
}
