"""`torch.func` in compiled functions, on the CPU and on the XLA device."""

import pytest
import torch
from torch.func import grad, hessian, jvp, vmap

from tests.spine import compiled

TRANSFORMS = {
    "gradients": lambda w, x: grad(lambda w: (w * w * x).sum())(w),
    "gradients_of_each_sample": lambda w, x: vmap(grad(lambda w, x: (w * x).tanh().sum()), (None, 0))(w, x),
    "jvp": lambda w, x: jvp(lambda w: (w * x).sin(), (w,), (torch.ones_like(w),)),
    "hessian": lambda w, x: hessian(lambda v: (v**3).sum())(w[0]),
    "parts_of_complex_rows": lambda w, x: vmap(lambda v: torch.view_as_real(torch.complex(v, v)).mT)(w),
    "numbers": lambda w, x: vmap(lambda v: (v * 2, v + True, v > 0.5))(w),
}


@pytest.mark.quick(
    "gradients-cpu", "gradients_of_each_sample-xla", "jvp-xla", "hessian-cpu", "parts_of_complex_rows-xla",
    "numbers-cpu",
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
