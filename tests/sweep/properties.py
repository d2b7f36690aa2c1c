"""Operators whose values are not compared one by one, and what is compared instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Uninitialised memory: structure, dtype and shape.
ONLY_SHAPES = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    }
)

# Random: structure, dtype, shape and the distribution (see `compare.statistics_mismatch`).
RANDOM = frozenset(
    {
        "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal",
        "normal.in_place", "normal.number_mean", "rand_like", "randint", "randint_like", "randn", "randn_like",
        "uniform", "nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.dropout2d",
        "nn.functional.dropout3d", "nn.functional.feature_alpha_dropout.with_train",
        "nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d", "nn.functional.rrelu",
        "nn.functional.scaled_dot_product_attention", "nn.functional.multi_head_attention_forward",

    }
)  # fmt: skip

# A value decides how large the result is: eager would take 17 GB for the largest of int32.
SIZED_BY_VALUES = frozenset({"bincount"})


def _eigenvectors(result: Any) -> list[torch.Tensor]:
    values, vectors = (t.cpu() for t in result)
    return [values, vectors @ torch.diag_embed(values).to(vectors.dtype) @ vectors.mH, vectors.mH @ vectors]


def _singular_vectors(u: torch.Tensor, s: torch.Tensor, vh: torch.Tensor) -> list[torch.Tensor]:
    rank = s.shape[-1]
    product = u[..., :rank] @ torch.diag_embed(s).to(u.dtype) @ vh[..., :rank, :]
    return [s, product, u.mH @ u, vh @ vh.mH]


def _linalg_svd(result: Any) -> list[torch.Tensor]:
    return _singular_vectors(*(t.cpu() for t in result))


def _svd(result: Any) -> list[torch.Tensor]:
    u, s, v = (t.cpu() for t in result)
    return _singular_vectors(u, s, v.mH)


# Vectors that are unique up to a sign (or a rotation, where values coincide): the values, the product that
# gives back the argument, and that the vectors are orthonormal.
UP_TO_SIGN: dict[str, Callable[[Any], Any]] = {
    "linalg.eigh": _eigenvectors,
    "linalg.svd": _linalg_svd,
    "svd": _svd,
    # Random projections of matrices of low rank, which they give back whole.
    "svd_lowrank": _svd,
    "pca_lowrank": _svd,
}
