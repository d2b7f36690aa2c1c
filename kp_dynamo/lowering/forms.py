"""The forms that replace operators while a graph is traced. A table of a `*_forms.py` counts once it is merged here.

An operator with a correct decomposition is in `autograd/decompositions/` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kp_dynamo.lowering.accumulation_forms import in_float32
from kp_dynamo.lowering.cast_forms import CAST_FORMS
from kp_dynamo.lowering.comparison_forms import COMPARISON_FORMS
from kp_dynamo.lowering.complex_forms import COMPLEX_FORMS
from kp_dynamo.lowering.complex_functions import COMPLEX_FUNCTIONS
from kp_dynamo.lowering.complex_powers import COMPLEX_POWERS
from kp_dynamo.lowering.contraction_forms import CONTRACTION_FORMS
from kp_dynamo.lowering.convolution_forms import CONVOLUTION_FORMS
from kp_dynamo.lowering.elementwise_forms import ELEMENTWISE_FORMS
from kp_dynamo.lowering.fourier_forms import FOURIER_FORMS
from kp_dynamo.lowering.grid_forms import GRID_FORMS
from kp_dynamo.lowering.index_forms import INDEX_FORMS
from kp_dynamo.lowering.integer_forms import INTEGER_FORMS
from kp_dynamo.lowering.linalg_forms import LINALG_FORMS
from kp_dynamo.lowering.loop_forms import LOOP_FORMS, SHARDED_LOOP_FORMS
from kp_dynamo.lowering.loss_forms import LOSS_FORMS
from kp_dynamo.lowering.nll_forms import NLL_FORMS
from kp_dynamo.lowering.norm_forms import NORM_FORMS
from kp_dynamo.lowering.order_forms import ORDER_FORMS
from kp_dynamo.lowering.pool_forms import POOL_FORMS
from kp_dynamo.lowering.pure_forms import PURE_FORMS
from kp_dynamo.lowering.random_forms import RANDOM_FORMS
from kp_dynamo.lowering.reduction_forms import REDUCTION_FORMS
from kp_dynamo.lowering.scan_forms import SCAN_FORMS
from kp_dynamo.lowering.scatter_forms import SCATTER_FORMS
from kp_dynamo.lowering.search_forms import SEARCH_FORMS
from kp_dynamo.lowering.sharded_convolutions import SHARDED_CONVOLUTIONS
from kp_dynamo.lowering.sharded_forms import sharding_form
from kp_dynamo.lowering.sharded_pads import SHARDED_PADS
from kp_dynamo.lowering.sharded_scatters import SCATTERS, scattered
from kp_dynamo.lowering.softmax_forms import SOFTMAX_FORMS
from kp_dynamo.lowering.view_forms import VIEW_FORMS
from kp_dynamo.lowering.window_forms import WINDOW_FORMS
from kp_dynamo.ops.optimization_barrier import copies

FORMS: dict[Any, Callable[..., Any]] = {
    **PURE_FORMS, **VIEW_FORMS, **NORM_FORMS, **REDUCTION_FORMS, **ELEMENTWISE_FORMS, **RANDOM_FORMS, **POOL_FORMS,
    **LINALG_FORMS, **CAST_FORMS, **INTEGER_FORMS, **COMPARISON_FORMS, **INDEX_FORMS, **SCATTER_FORMS,
    **SOFTMAX_FORMS, **SCAN_FORMS, **ORDER_FORMS, **LOOP_FORMS, **COMPLEX_FORMS, **COMPLEX_FUNCTIONS, **COMPLEX_POWERS,
    **FOURIER_FORMS, **WINDOW_FORMS, **SEARCH_FORMS, **CONTRACTION_FORMS, **CONVOLUTION_FORMS,
    **GRID_FORMS, **NLL_FORMS, **LOSS_FORMS,
}  # fmt: skip

# Under SPMD, these come before `FORMS`.
SHARDED_FORMS: dict[Any, Callable[..., Any]] = {
    **SHARDED_PADS, **SHARDED_LOOP_FORMS, **SHARDED_CONVOLUTIONS, torch.ops.kp.wait_for_all.default: copies,
}  # fmt: skip


def form_of(target: Any, is_sharded: bool) -> Callable[..., Any] | None:
    """The form that replaces an operator while a graph is traced; None if torch_xla's own lowering is right.

    Args:
        target: The operator.
        is_sharded: Whether the program runs on several devices. On one device, marking a tensor does nothing.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return None
    form = FORMS.get(target, target)
    if is_sharded:
        form = SHARDED_FORMS.get(target, form)
    if target in SCATTERS and is_sharded:
        form = partial(scattered, form)
    if (wide := in_float32(target, form)) is not target:
        return wide
    return sharding_form(target, is_sharded)
