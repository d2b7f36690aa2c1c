"""`torch.func` in compiled functions, on the CPU and on the XLA device."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, hessian, jacrev, jvp, vmap

from tests.spine import compiled


def masked(x, mask):
    x = x.clone()
    x[mask] = 2.0
    return x


def loss(x):
    """Of 4 positions and 3 classes, [1, 3, 4]."""
    return F.cross_entropy((x[..., None] @ torch.ones(1, 3, device=x.device)).mT, torch.zeros_like(x).long())


TRANSFORMS = {
    "gradients": lambda w, x: grad(lambda w: (w * w * x).sum())(w),
    "gradients_of_each_sample": lambda w, x: vmap(grad(lambda w, x: (w * x).tanh().sum()), (None, 0))(w, x),
    "jvp": lambda w, x: jvp(lambda w: (w * x).sin(), (w,), (torch.ones_like(w),)),
    "hessian": lambda w, x: hessian(lambda v: (v**3).sum())(w[0]),
    "parts_of_complex_rows": lambda w, x: vmap(lambda v: torch.view_as_real(torch.complex(v, v)).mT)(w),
    "numbers": lambda w, x: vmap(lambda v: (v * 2, v + True, v > 0.5))(w),
    "masked_writes": lambda w, x: vmap(masked, (0, None))(w, x[1] > 1),
    "masked_writes_in_gradients": lambda w, x: vmap(grad(lambda v: masked(v, x[1] > 1).square().sum()))(w),
    "masked_writes_in_nested_samples": lambda w, x: vmap(vmap(masked, (0, None)), (1, None), 1)(
        torch.stack([w, x]), x[1] > 1
    ),
    "losses_of_positions": lambda w, x: grad(loss)(w),
    "losses_of_positions_of_each_sample": lambda w, x: vmap(grad(loss))(w[:, None]),
    "losses_of_positions_backward": lambda w, x: jacrev(loss)(w),
}


@pytest.mark.quick(
    "gradients-cpu", "gradients_of_each_sample-xla", "jvp-xla", "hessian-cpu", "parts_of_complex_rows-xla",
    "numbers-cpu", "masked_writes_in_nested_samples-xla", "losses_of_positions_of_each_sample-xla",
)  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_is_like_eager(name, device):
    """Tensors inside a transform have no storage to ask for, and numbers reach casts as numbers."""
    function = TRANSFORMS[name]
    w, x = torch.linspace(-1, 1, 12).reshape(3, 4), torch.linspace(0, 2, 12).reshape(3, 4)
    found = compiled(function, precision="float32", strict=True)(w.to(device), x.to(device))
    leaves = torch.utils._pytree.tree_leaves(found)
    for result, expected in zip(leaves, torch.utils._pytree.tree_leaves(function(w, x)), strict=True):
        torch.testing.assert_close(result.cpu(), expected)
