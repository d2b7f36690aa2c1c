"""The precision of float32 matmuls: the option, or else what torch is set to."""

from __future__ import annotations

from typing import Literal

from kp_dynamo.exceptions import TPUConfigurationError

MatmulPrecision = Literal["default", "high", "highest"]

_MATMUL_PRECISION_OF_TORCH: dict[str, MatmulPrecision] = {"highest": "highest", "high": "high", "medium": "default"}


def resolve_matmul_precision(chosen: MatmulPrecision | None, torch_setting: str) -> MatmulPrecision:
    """The precision of float32 matmuls, from the option and `torch.get_float32_matmul_precision()`.

    torch's "medium" (one bfloat16 pass) is XLA's "default"; the other names mean the same in both.
    """
    if chosen is not None:
        return chosen
    if torch_setting not in _MATMUL_PRECISION_OF_TORCH:
        raise TPUConfigurationError(
            f"torch.get_float32_matmul_precision()={torch_setting!r} is invalid. "
            f"Allowed: {', '.join(_MATMUL_PRECISION_OF_TORCH)}. "
            "Try: set the option 'matmul_precision' to 'default', 'high' or 'highest'."
        )
    return _MATMUL_PRECISION_OF_TORCH[torch_setting]
