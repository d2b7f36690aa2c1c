"""Powers of, and to, numbers that vary from call to call."""

import pytest
import torch

from tests.spine import DEVICES, compiled

X = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.quick("exponent-int-cpu", "exponent-float-xla", "base-float-xla", "sum-int-cpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("numbers", [(3, 0, 4), (2.5, 0.0, 1.5)], ids=["int", "float"])
@pytest.mark.parametrize(
    "power",
    [lambda x, n: x**n, lambda x, n: (n + 2) ** x, lambda x, n: torch.pow(x, n + 1)],
    ids=["exponent", "base", "sum"],
)
def test_values_and_gradients_are_those_of_eager(power, numbers, device):
    run = compiled(power)
    with torch._dynamo.config.patch(automatic_dynamic_shapes=True, specialize_float=False):
        for n in numbers:
            x, there = X.clone().requires_grad_(), X.clone().to(device).requires_grad_()
            expected, result = power(x, n), run(there, n)
            expected.sum().backward(), result.sum().backward()
            torch.testing.assert_close(result.cpu(), expected)
            torch.testing.assert_close(there.grad.cpu(), x.grad)
