"""Operators on lists of tensors are computed as those on one tensor: by the same decompositions and forms."""

import pytest
import torch

from kp_dynamo.autograd.decompositions.lists import list_decompositions
from tests.spine import DEVICES, assert_same, compiled, on

INF = float("inf")
X, Y = torch.tensor([-INF, 3.0, 41.0]), 41.0 * torch.arange(1, 4)

CASES = {
    "clamp_max": lambda x, y: torch._foreach_clamp_max([x, y], 1.0),
    "div": lambda x, y: [t.floor() for t in torch._foreach_div([y, y * 2], 41.0)],
    "lerp": lambda x, y: torch._foreach_lerp([y * 1e7], [y], 1.0),
    "log10 of float64": lambda x, y: torch._foreach_log10([y.double(), y.double() + 1]),
    "norm": lambda x, y: torch._foreach_norm([y, y * 3], 1),
    "addcdiv": lambda x, y: torch._foreach_addcdiv([y, y], [y, y + 1], [y + 2, y + 3], [0.5, 2.0]),
    "addcmul by name": lambda x, y: torch._foreach_addcmul([y, y], [y, y + 1], [y + 2, y + 3], value=0.5),
    "maximum": lambda x, y: torch._foreach_maximum([x, y], 50.0),
    "add with alpha": lambda x, y: torch._foreach_add([x, y], [y, x], alpha=-2),
    "a number to powers": lambda x, y: torch._foreach_pow(2.0, [y / 41, y / 82]),
    "in place": lambda x, y: (torch._foreach_mul_([a := x.clone(), b := y.clone()], [2.0, 3.0]), a, b)[1:],
    "by a tensor": lambda x, y: torch._foreach_mul([x, y], y[0]),
}


@pytest.mark.quick("clamp_max-cpu", "div-xla", "log10 of float64-cpu", "in place-cpu", "a number to powers-cpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_values_are_eagers(name, device):
    wanted = CASES[name](X, Y)
    found = compiled(CASES[name])(*on(device, (X, Y)))
    assert_same([t.cpu() for t in found], list(wanted))
    if name in ("clamp_max", "div", "lerp"):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, wanted, strict=True))


def test_nearly_every_list_operator_has_a_decomposition():
    names = {str(op) for op in list_decompositions()}
    assert {"aten._foreach_add.Scalar", "aten._foreach_norm.Scalar", "aten._foreach_copy.default"} <= names
    assert "aten._foreach_addcdiv.Tensor" not in names
    assert not any(name.split(".")[1].endswith("_") for name in names)
