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


def _differs(reason: str, *kinds: str) -> Difference:
    return Difference(reason, frozenset(kinds))


KNOWN_EXTREMES: dict[str, Difference] = {
    "amax": _differs("the gradient of a 0-dim NaN is 0: XLA simplifies 0 / 0 of one element", "nan"),
    "cdist": _differs("p = 0 counts a NaN as a difference", *_INFINITE, "nan"),
    "cholesky": _differs("XLA's own factorisation; eager gives the infinity back", "inf"),
    "native_layer_norm": _differs(_MEAN, *_INFINITE),
    "nn.functional.hardswish": _differs("eager's scalar kernel has another gradient of NaN than its vectors", "nan"),
    "nn.functional.interpolate.linear": _differs("infinity times a weight of 0", *_INFINITE),
    "nn.functional.multi_margin_loss": _differs("eager leaves a NaN out", "nan"),
    "nn.functional.rms_norm": _differs("a gradient that cancels: eager's first digit is wrong as well", "huge"),
    "std_mean.unbiased": _differs(_MEAN, *_INFINITE),
    "var_mean.unbiased": _differs(_MEAN, *_INFINITE),
}
