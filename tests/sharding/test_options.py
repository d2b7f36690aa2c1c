"""A divided model with other options and habits of training; `checks_of_options.py` trains it."""

import pytest
import torch

from kp_dynamo import load_checkpoint, save_checkpoint
from tests.sharding.asking import CLOSE, asked
from tests.sharding.checks_of_options import continued
from tests.sharding.model_cases import MODELS

pytestmark = pytest.mark.slow


def _assert_close(answer):
    assert isinstance(answer, dict), answer
    assert answer["loss"] < CLOSE
    assert answer["parameters"] < CLOSE


@pytest.mark.parametrize("name", ["batches_that_do_not_divide", "backwards_that_accumulate"])
def test_batches(name):
    for answer in asked(name)[name]:
        _assert_close(answer)


def test_lengths_in_buckets_are_one_program():
    for answer in asked("lengths_in_buckets")["lengths_in_buckets"]:
        _assert_close(answer)
        assert answer["programs"] == 4  # Dynamo takes the first length for a constant; each has a forward and backward


def test_recomputation():
    answers = asked("recomputation", "blocks_with_recomputation")
    for answer in [*answers["recomputation"], answers["blocks_with_recomputation"]]:
        _assert_close(answer)


def test_a_compiled_optimizer_that_donates():
    answer = asked("a_compiled_optimizer_that_donates")["a_compiled_optimizer_that_donates"]
    _assert_close(answer)
    assert answer["misplaced"] == 0
    assert answer["donated"] > 0


def test_dropout_draws_what_one_device_draws():
    for loss, gradients in asked("dropout")["dropout"]:
        assert max(loss, gradients) < CLOSE


def _llama_in_eager():
    model = MODELS["llama"].make()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def test_a_checkpoint_of_eight_devices_continues_on_one(tmp_path):
    path = tmp_path / "llama"
    expected = asked("save_in_the_middle", KP_TEST_CHECKPOINT=str(path))["save_in_the_middle"]
    model, optimizer = _llama_in_eager()
    assert load_checkpoint(path, model, optimizer).step == 3
    assert continued(model, model, optimizer, range(3, 6)) == pytest.approx(expected[3:], rel=CLOSE)


def test_a_checkpoint_of_one_device_continues_on_eight(tmp_path):
    path = tmp_path / "llama"
    model, optimizer = _llama_in_eager()
    continued(model, model, optimizer, range(3))
    save_checkpoint(path, model, optimizer, step=3)
    expected = continued(model, model, optimizer, range(3, 6))
    for losses, misplaced in asked("load_in_the_middle", KP_TEST_CHECKPOINT=str(path))["load_in_the_middle"]:
        assert losses == pytest.approx(expected, rel=CLOSE)
        assert misplaced == 0


def test_a_state_that_is_loaded_lies_as_its_parameter(tmp_path):
    name = "a_compiled_optimizer_whose_state_was_loaded"
    assert asked(name, KP_TEST_CHECKPOINT=str(tmp_path / "llama"))[name] == [0, 0]
