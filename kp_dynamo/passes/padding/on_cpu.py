"""Operators that torch_xla 2.9 does not lower and that run on the CPU: there they get the true sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from kp_dynamo.ops.at_true_sizes import described
from kp_dynamo.passes.padding.atoms import Padded, Refused, plain
from kp_dynamo.passes.padding.call import Call, Like, unwrapped
from kp_dynamo.passes.padding.rules import aten, kp, rule

_NAMES = """
_fft_r2c _fft_c2c _fft_c2r mode index_reduce put histc _linalg_svd _linalg_eigh linalg_qr linalg_eig _linalg_det
_linalg_slogdet _linalg_solve_ex linalg_inv_ex linalg_cholesky_ex linalg_lu_factor_ex linalg_lu linalg_lu_solve
linalg_matrix_exp linalg_solve_triangular cholesky_solve cholesky_inverse grid_sampler_2d grid_sampler_2d_backward
_adaptive_avg_pool2d _adaptive_avg_pool2d_backward
"""


@rule(*(getattr(aten, name).default for name in _NAMES.split()), lengths="last_dim_size output_size")
def _at_true_sizes(call: Call) -> Any:
    likes = pytree.tree_leaves(call.like)
    if not all(isinstance(like, Like) for like in likes):
        raise Refused("a result is not a tensor")
    leaves = pytree.tree_leaves((call.args, call.kwargs), is_leaf=lambda x: isinstance(x, Padded))
    lengths = [call.masks.true_value(x) for x in leaves if isinstance(x, torch.SymInt)]
    if len(call.seen) != len(call.operands()):
        raise Refused("the fake tensors of its operands are unknown")
    values = [like.value for like in likes]
    what = described(call.target, unwrapped(call.args), unwrapped(call.kwargs), call.seen, values)
    if what is None:
        raise Refused("an argument cannot be serialized")
    sizes = [call.masks.true_count(x, [d]) for x in call.operands() for d in range(len(x.dims))]
    true_sizes = torch.stack([torch.as_tensor(size) for size in (*sizes, *lengths)])
    shapes = [like.shape for like in likes]
    results = kp.at_true_sizes(what, [x.tensor for x in call.operands()], true_sizes, [n for s in shapes for n in s])
    padded = [Padded(result, plain(shape)) for result, shape in zip(results, shapes, strict=True)]
    return padded[0] if isinstance(call.like, Like) else tuple(padded)
