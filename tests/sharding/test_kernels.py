"""Flash attention kernels of a divided model; `checks_of_kernels.py` trains it."""

import pytest

from tests.sharding.asking import CLOSE, asked
from tests.sharding.checks_of_kernels import SHARDINGS


@pytest.fixture(scope="module")
def answers():
    return asked("kernels_of_a_divided_model")["kernels_of_a_divided_model"]


@pytest.mark.slow
@pytest.mark.parametrize("how", list(SHARDINGS))
def test_each_device_computes_the_attention_of_its_own_heads(answers, how):
    answer = answers[how]
    assert answer["loss"] < CLOSE
    assert answer["gradients"] < CLOSE
    _, _, rows = SHARDINGS[how]
    num_heads = rows * 4
    divides = num_heads % 8 == 0
    parts = [part for part, _, _ in answer["called"]]
    assert parts == (["train", "keys", "queries"] if divides else [])  # others are computed as kp::attention
    for _, of_kernel, shapes in answer["called"]:
        assert of_kernel == num_heads // 8
        assert all(shape == [1, of_kernel] for shape in shapes)


@pytest.mark.slow
def test_no_gradient_waits_for_its_reduction(answers):
    """A barrier would keep the sum over the devices from overlapping with the rest of the backward."""
    assert [answer["waits"] for answer in answers.values()] == [[False, False]] * len(SHARDINGS)
