"""The tables of cast_bf16: what is a product, what never leaves float32, what moves data without touching it.

Sources: torch.autocast's lists for CUDA and the CPU (torch/csrc, `autocast_mode.h`), and where these are silent
the rule that an op is sensitive if it turns a relative error of its operand into a larger one of its result.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

import kp_dynamo.ops  # noqa: F401  # registers the operators

aten = torch.ops.aten
kp = torch.ops.kp

# Positions of the operands that are multiplied. The addend of addmm and baddbmm and the bias of a convolution are not
# among them: they are accumulated, in float32.
PRODUCTS: dict[Any, tuple[int, ...]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
    aten.convolution.default: (0, 1),
    aten.convolution_backward.default: (0, 1, 2),
    kp.linear_act.default: (0, 1),
    kp.linear_act_train.default: (0, 1),
    kp.contract.default: (0, 1),
    # Queries, keys and values; and before them the gradient, behind them the result.
    kp.attention.default: (0, 1, 2),
    kp.attention_train.default: (0, 1, 2),
    kp.attention_backward.default: (0, 1, 2, 3, 4),
    kp.flash_attention.default: (0, 1, 2),
    kp.flash_attention_train.default: (0, 1, 2),
    kp.flash_attention_backward.default: (0, 1, 2, 3, 4),
}
LINEAR_ACTS = (kp.linear_act.default, kp.linear_act_train.default)
# Multiples of their operands are multiples of their result.
UNBIASED = (aten.mm.default, aten.bmm.default)
# Where the addend is, for those that want it in the dtype of the operands.
BIASES: dict[Any, int] = {aten.addmm.default: 0, aten.convolution.default: 2}

# An absolute error of the operand becomes a relative one of the result: what they read keeps its float32.
EXPONENTIALS = (
    "_softmax", "_safe_softmax", "_log_softmax", "logsumexp", "logcumsumexp", "exp", "exp2", "expm1",
)  # fmt: skip
# Read modulo a period, so that bfloat16's error of a large angle is a wrong angle.
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

# Views and copies of all elements: a cast may come before or after, it is the same.
VIEWS = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
    aten.expand.default, aten.clone.default, aten.alias.default, aten.detach.default,
)  # fmt: skip
# Parts and joints: the same, but a cast before a part is of more elements.
PARTS = (
    aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int,
    aten.cat.default, operator.getitem,
)  # fmt: skip
# Rearrange values by integer operands, or fill in others: exact in any dtype.
MOVES = (
    aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.constant_pad_nd.default, aten.flip.default,
    aten.roll.default, aten.repeat.default, aten.stack.default, aten.slice_scatter.default,
    aten.select_scatter.default, aten.tril.default, aten.triu.default, aten.max_pool2d_with_indices.default,
    aten.upsample_nearest2d.default, aten.leaky_relu.default, aten.leaky_relu_backward.default,
)  # fmt: skip

_SENSITIVE_NAMES = frozenset(name for names in SENSITIVE.values() for name in names)


def is_sensitive(target: object) -> bool:
    """Whether an ATen op never leaves float32; the special functions of torch.special are no exception."""
    name = op_name(target)
    return name in _SENSITIVE_NAMES or name.startswith("special_")


def op_name(target: object) -> str:
    """Of aten.mm.default: "mm"; empty for what is no ATen op."""
    is_aten = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    return target._schema.name.removeprefix("aten::") if is_aten else ""  # type: ignore[attr-defined]


def may_follow(target: object) -> bool:
    """Whether an op on bfloat16 operands may run in bfloat16: pointwise or a move, and off the sensitive list."""
    if not isinstance(target, torch._ops.OpOverload) or target in VIEWS + PARTS or is_sensitive(target):
        return False
    return target in MOVES or (torch.Tag.pointwise in target.tags and target.namespace == "aten")


def users_behind(node: fx.Node, through: tuple[Any, ...]) -> list[fx.Node]:
    """Who reads `node`, looking through the ops of `through`."""
    found: list[fx.Node] = []
    for user in node.users:
        found += users_behind(user, through) if user.target in through else [user]
    return found
