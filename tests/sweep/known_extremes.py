"""Operators that differ from eager at some kinds of values or shapes (see `kinds.py`), each with its reason.

A listed kind that is right fails the test, so that the list only says what is true. The exception are differences that
come from kernels which MKL or LAPACK chooses by processor: on some they do not occur.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.sweep.kinds import FLOATS, INTEGERS, SHAPES, SUBNORMAL, WHOLE


@dataclass(frozen=True)
class Difference:
    """At which kinds an operator differs from eager, and why; `varies` if that depends on the processor."""

    reason: str
    kinds: frozenset[str]
    varies: bool = False

    def explains(self, found: frozenset[str]) -> bool:
        """Whether these are the kinds at which it may differ."""
        return found <= self.kinds if self.varies else found == self.kinds


_INFINITE = ("inf", "-inf")
_MEAN = "the mean of infinities is infinite; eager's running mean of a variance is NaN"


_ALL = tuple(FLOATS)
_NO_PLACE = "equal elements have places of their own"
_LERP = "torch takes it apart: v1 + (v2 - v1) * weight, in which infinities cancel; eager weighs each"
_TRACED = "the gradient that is traced has another form than eager's, under any backend of torch"
_WINDOW = "the gradient of a window with a NaN goes nowhere"
_SCALAR = "eager's scalar kernel has another gradient of NaN than its vectors"
_SINGULAR = "the vectors of a singular value of 0 are not unique, nor is its gradient"
_CANCELS = "terms of a gradient that cancel, each rounded once"
_OWN_ALGORITHM = "XLA's algorithm takes other steps than LAPACK's"
_REFUSED_FILL = "refused: a value that wants a gradient"
_FAKES = "torch's own fake tensors fail, under any backend"
_HALF = "refused: XLA has no complex numbers of half precision"
_TRANSFORM = "MKL's algorithm has an infinity or a number where XLA's has NaN: the terms are grouped differently"
_TRANSFORM_CANCELS = "terms of a transform that cancel: XLA adds them in another order than MKL"
_TO_COMPLEX = "fft fft2 fftn ifft ifft2 ifftn rfft rfft2 rfftn ihfft ihfft2 ihfftn"
_TO_REAL = "hfft hfft2 hfftn irfft irfft2 irfftn"
_SOLVED = "a gradient of many digits lost: eager's float32 is as far from float64"


def _differs(reason: str, *kinds: str, varies: bool = False) -> Difference:
    return Difference(reason, frozenset(kinds), varies)


KNOWN_FLOATS: dict[str, Difference] = {
    "cdist": _differs("p = 0 counts a NaN as a difference", *_INFINITE, "nan"),
    "chalf": _differs(_HALF, *_ALL),
    "cholesky": _differs("XLA's own factorisation; eager gives the infinity back", "inf"),
    "cumprod": _differs(_TRACED, *_INFINITE),
    "dist": _differs("powers of tiny differences underflow; eager accumulates in float64", "tiny"),
    **{f"fft.{name}": _differs(_TRANSFORM, *_INFINITE, "nan") for name in _TO_COMPLEX.split()},
    **{f"fft.{name}": _differs(_TRANSFORM, *_INFINITE) for name in _TO_REAL.split()},
    "index_fill": _differs(_REFUSED_FILL, *_ALL),
    "kthvalue": _differs(_NO_PLACE, *_INFINITE, "nan", "zero", SUBNORMAL),
    "linalg.lu_solve": _differs(_SOLVED, "huge", varies=True),
    "linalg.svdvals": _differs(_SINGULAR, "zero", SUBNORMAL),
    "logit": _differs(_SCALAR, "nan"),
    "lu_solve": _differs(_SOLVED, "huge", varies=True),
    "masked.cumprod": _differs(_TRACED, *_INFINITE, "nan"),
    "max_pool2d_with_indices_backward": _differs(_WINDOW, "nan"),
    "native_layer_norm": _differs(_MEAN, *_INFINITE),
    "nn.functional.conv_transpose3d": _differs("XLA multiplies the zeros between elements too", *_INFINITE, "nan"),
    "nn.functional.hardswish": _differs(_SCALAR, "nan"),
    "nn.functional.interpolate.bilinear": _differs(_LERP, *_INFINITE),
    "nn.functional.interpolate.linear": _differs(_LERP, *_INFINITE),
    "nn.functional.interpolate.trilinear": _differs(_LERP, *_INFINITE),
    "nn.functional.max_pool1d": _differs(_WINDOW, "nan"),
    "nn.functional.max_pool2d": _differs(_WINDOW, "nan"),
    "nn.functional.multi_margin_loss": _differs("eager leaves a NaN out", "nan"),
    "nn.functional.multilabel_margin_loss": _differs("eager leaves a NaN out", "nan"),
    "nn.functional.relu6": _differs(_SCALAR, "nan"),
    "nn.functional.rms_norm": _differs("a gradient that cancels: eager's first digit is wrong as well", "huge"),
    "nn.functional.upsample_bilinear": _differs(_LERP, *_INFINITE),
    "norm.nuc": _differs(_SINGULAR, "zero", SUBNORMAL),
    "prod": _differs(_TRACED, *_INFINITE),
    "std_mean": _differs(_MEAN, *_INFINITE),
    "std_mean.unbiased": _differs(_MEAN, *_INFINITE),
    "stft": _differs(_TRANSFORM, *_INFINITE, "nan"),
    "topk": _differs(_NO_PLACE, *_INFINITE, "nan", "zero", SUBNORMAL),
    "triangular_solve": _differs("XLA inverts blocks of the triangle", *_INFINITE, "nan", "zero", SUBNORMAL),
    "var_mean": _differs(_MEAN, *_INFINITE),
    "var_mean.unbiased": _differs(_MEAN, *_INFINITE),
}

KNOWN_INTEGERS: dict[str, Difference] = {
    **{f"fft.{name}": _differs(_TRANSFORM_CANCELS, "least", "largest") for name in f"{_TO_COMPLEX} {_TO_REAL}".split()},
    "chalf": _differs(_HALF, *INTEGERS),
    "kthvalue": _differs(_NO_PLACE, *INTEGERS),
    "to_sparse": _differs("refused: XLA has dense tensors only", *INTEGERS),
    "topk": _differs(_NO_PLACE, *INTEGERS),
}

KNOWN_WHOLE: dict[str, Difference] = {
    "chalf": _differs(_HALF, *WHOLE),
    "cumprod": _differs(_CANCELS, "multiples"),
    "fft.hfft": _differs(_TRANSFORM_CANCELS, "whole"),
    "fft.hfft2": _differs(_TRANSFORM_CANCELS, "equal", varies=True),
    "fft.hfftn": _differs(_TRANSFORM_CANCELS, "equal", varies=True),
    "fft.irfft": _differs(_TRANSFORM_CANCELS, "whole"),
    "index_fill": _differs(_REFUSED_FILL, *WHOLE),
    "kthvalue": _differs(_NO_PLACE, *WHOLE),
    "linalg.eigvalsh": _differs(_OWN_ALGORITHM, "whole", "equal", varies=True),
    "linalg.householder_product": _differs(_OWN_ALGORITHM, "whole"),
    "linalg.svdvals": _differs(_OWN_ALGORITHM, "equal"),
    "linalg.vector_norm": _differs(_CANCELS, "multiples"),
    "native_layer_norm": _differs(_CANCELS, "whole"),
    "nn.functional.cosine_similarity": _differs(_CANCELS, "equal"),
    "nn.functional.gelu": _differs("1 less than three roundings, as XLA's error function ends", "equal", "multiples"),
    "nn.functional.multilabel_margin_loss": _differs("a sum of quotients that XLA adds in another order", "equal"),
    "nn.functional.softmin.with_dtype": _differs("0 in float64 too, but for the range of float32", "whole"),
    "nn.functional.triplet_margin_loss": _differs(_CANCELS, "equal"),
    "nn.functional.triplet_margin_with_distance_loss": _differs(_CANCELS, "equal"),
    "ormqr": _differs(_OWN_ALGORITHM, "whole"),
    "softmax.with_dtype": _differs("0 in float64 too, but for the range of float32", "whole"),
    "stft": _differs(_TRANSFORM_CANCELS, "whole", "multiples"),
    "topk": _differs(_NO_PLACE, *WHOLE),
    "triangular_solve": _differs("XLA inverts blocks of the triangle", "equal", "multiples"),
}

KNOWN_SHAPES: dict[str, Difference] = {
    "chalf": _differs(_HALF, *SHAPES),
    "index_fill": _differs(_REFUSED_FILL, "first without rows", "scalars", "first and scalars"),
    "split": _differs(_FAKES, "no rows", "first without rows"),
    "unsafe_chunk": _differs(_FAKES, "no rows", "first without rows"),
    "unsafe_split": _differs(_FAKES, "no rows", "first without rows"),
}

KNOWN_EXTREMES = {"floats": KNOWN_FLOATS, "integers": KNOWN_INTEGERS, "whole": KNOWN_WHOLE, "shapes": KNOWN_SHAPES}
