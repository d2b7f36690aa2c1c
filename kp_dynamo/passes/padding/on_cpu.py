"""Operators that run on the CPU, where they get the true sizes: torch_xla 2.9 does not lower them, or not any length.

A Fourier transform along a padded dimension is of the second kind: the length decides the factors of each term.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from kp_dynamo.ops.at_true_sizes import described
from kp_dynamo.passes.padding.atoms import Padded, Refused, has_tail, is_padded, plain
from kp_dynamo.passes.padding.call import Call, Like, unwrapped
from kp_dynamo.passes.padding.rules import aten, kp, rule

_NAMES = """
mode index_reduce put histc _linalg_svd _linalg_eigh linalg_qr linalg_eig _linalg_det
_linalg_slogdet _linalg_solve_ex linalg_inv_ex linalg_cholesky_ex linalg_lu_factor_ex linalg_lu linalg_lu_solve
linalg_matrix_exp linalg_solve_triangular cholesky_solve cholesky_inverse grid_sampler_2d grid_sampler_2d_backward
_adaptive_avg_pool2d _adaptive_avg_pool2d_backward
"""


@rule(*(getattr(aten, name).default for name in _NAMES.split()), lengths="output_size")
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


@rule(aten._fft_r2c.default, aten._fft_c2c.default, aten._fft_c2r.default, lengths="last_dim_size")
def _transform(call: Call) -> Any:
    """On the device, if no transformed dimension is padded."""
    x, dims = call.args[:2]
    is_of_length = call.target is aten._fft_c2r.default and is_padded(call.args[3])
    if is_of_length or any(has_tail(x.dims[d]) for d in dims):
        return _at_true_sizes(call)
    transformed = {d % len(x.dims) for d in dims}
    new = plain(call.like.shape)
    found = tuple(new[d] if d in transformed else atoms for d, atoms in enumerate(x.dims))
    return Padded(call.unchanged(), found)
