"""The table of ops that cast_bf16 keeps in float32, and the rule for ops that may follow a matmul into bfloat16.

The matmuls themselves are `MATMULS` in `graph/op_tables.py`.

Sources: torch.autocast's lists for CUDA and the CPU (torch/csrc, `autocast_mode.h`). For ops that these omit, the rule
is that an op is sensitive if it turns a relative error of its operand into a larger one of its result.
"""

from __future__ import annotations

import torch

from kp_dynamo.graph.op_tables import MOVES, PARTS, VIEWS, op_name

# An absolute error of the operand becomes a relative error of the result, so their operands stay in float32.
EXPONENTIALS = (
    "_softmax", "_safe_softmax", "_log_softmax", "logsumexp", "logcumsumexp", "exp", "exp2", "expm1",
)  # fmt: skip
# These read their operand modulo a period: the bfloat16 error of a large angle gives another angle.
ANGLES = ("sin", "cos", "tan", "sinc")

SENSITIVE: dict[str, tuple[str, ...]] = {
    "exponential": (*EXPONENTIALS, "_softmax_backward_data", "_log_softmax_backward_data", "sinh", "cosh"),
    "logarithm": (
        "log", "log2", "log10", "log1p", "logaddexp", "logaddexp2", "logit", "logit_backward", "xlogy", "softplus",
        "softplus_backward", "log_sigmoid_forward", "log_sigmoid_backward", "lgamma", "digamma", "mvlgamma",
        "polygamma",
    ),
    "power, root or quotient": (
        "pow", "square", "sqrt", "rsqrt", "reciprocal", "addcdiv", "hypot", "float_power", "fmod", "remainder",
    ),
    "angle": (
        *ANGLES, "asin", "acos", "atan", "atan2", "asinh", "acosh", "atanh", "angle", "polar", "deg2rad", "rad2deg",
    ),
    "inverse or special function": (
        "erfinv", "erfc", "erf", "igamma", "igammac", "i0", "frexp", "ldexp", "nextafter", "frac", "cdist", "dist",
    ),
    "loss": (
        "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward", "mse_loss",
        "mse_loss_backward", "smooth_l1_loss", "smooth_l1_loss_backward", "huber_loss", "huber_loss_backward",
        "binary_cross_entropy", "binary_cross_entropy_backward", "soft_margin_loss", "multi_margin_loss", "_ctc_loss",
    ),
    "norm": (
        "native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward",
        "native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit",
        "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training", "_fused_rms_norm", "norm",
        "linalg_vector_norm", "var", "var_mean", "std", "std_mean", "renorm",
    ),
    "sum over many": (
        "sum", "mean", "nansum", "prod", "cumsum", "cumprod", "embedding_dense_backward", "scatter_add", "index_add",
        "index_put", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "trace", "dot", "mv", "addmv",
    ),
}  # fmt: skip

_SENSITIVE_NAMES = frozenset(name for names in SENSITIVE.values() for name in names)


def is_sensitive(target: object) -> bool:
    """Whether an ATen op always stays in float32, including the functions of torch.special."""
    name = op_name(target)
    return name in _SENSITIVE_NAMES or name.startswith("special_")


def may_follow(target: object) -> bool:
    """Whether an op on bfloat16 operands may run in bfloat16: pointwise or a move, and not sensitive."""
    if not isinstance(target, torch._ops.OpOverload) or target in VIEWS + PARTS or is_sensitive(target):
        return False
    return target in MOVES or (torch.Tag.pointwise in target.tags and target.namespace == "aten")
