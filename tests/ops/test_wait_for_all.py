"""`kp::wait_for_all`: a barrier for a TPU's compiler on one device, and nothing anywhere else."""

from __future__ import annotations

import pytest
import torch
import torch_xla

from kp_dynamo.compat import xla
from kp_dynamo.lowering.forms import form_of
from kp_dynamo.ops.optimization_barrier import barriers

wait_for_all = torch.ops.kp.wait_for_all


def program(wait, values: list[torch.Tensor]) -> str:
    return str(torch_xla._XLAC._get_xla_tensors_hlo([value.cos() for value in wait(values)]))


@pytest.fixture
def values() -> list[torch.Tensor]:
    device = torch_xla.device()
    return [torch.ones(4, device=device).sin(), torch.ones(2, device=device).exp()]


def test_the_program_of_a_tpu_has_a_barrier(values):
    with barriers(xla.optimization_barrier):
        assert "opt-barrier" in program(wait_for_all, values)


def test_any_other_program_is_that_without_the_operator(values):
    plain = program(list, values)
    assert "opt-barrier" not in plain
    assert program(wait_for_all, values) == plain


def test_several_devices_are_left_in_their_own_order(values):
    form = form_of(wait_for_all.default, is_sharded=True)
    assert form is not None
    with barriers(xla.optimization_barrier):
        assert "opt-barrier" not in program(form, values)


def test_eager_is_the_identity_with_memory_of_its_own():
    values = [torch.randn(3, 4).t(), torch.zeros(3, dtype=torch.int64)]
    found = wait_for_all(values)
    for result, value in zip(found, values, strict=True):
        torch.testing.assert_close(result, value, rtol=0, atol=0)
        assert result.stride() == value.stride()
        assert result.data_ptr() != value.data_ptr()


def test_its_fakes_agree_with_it():
    torch.library.opcheck(wait_for_all.default, ([torch.randn(3, 4).t(), torch.zeros(2)],))


def test_two_sums_around_it_are_rounded_as_in_eager():
    """XLA:CPU sees no barrier, and would add the constants first."""

    def both(x: torch.Tensor) -> torch.Tensor:
        return wait_for_all([x + 1e8])[0] - 1e8

    x = torch.linspace(0, 50, 11)
    run = torch.compile(both, backend="kp_tpu", options={"precision": "float32", "strict": True})
    torch.testing.assert_close(run(x), both(x), rtol=0, atol=0)
