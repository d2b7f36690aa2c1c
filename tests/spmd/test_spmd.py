"""Several devices: `tests/spmd/worker.py`, on four of XLA's CPU devices, asks; the answers are judged here."""

import json
import os
import subprocess
import sys
import types

import pytest
import torch
from torch.nn import functional as F

from kp_dynamo import TPUConfig, TPUDeviceError, TPUDistributedError
from kp_dynamo.api import environment
from kp_dynamo.compat import chips, xla
from kp_dynamo.compat.known_limits import KNOWN_LIMITS
from tests.spine import compiled, run_script

# The batch of 8 rows over four devices; a tensor that every device has.
ROWS, WHOLE = "{devices=[4,1]0,1,2,3}", "{replicated}"
NOT_YET_SENT = ""
CLOSE = 1e-5


def _asked(*names):
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.spmd.worker", *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: answer for line in done.stdout.splitlines() for name, answer in json.loads(line).items()}


@pytest.fixture(scope="module")
def answers():
    return _asked()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_twenty_steps_are_those_of_one_device(answers, optimizer):
    assert answers[optimizer]["loss"] < CLOSE
    assert answers[optimizer]["weights"] < CLOSE


def test_a_forward_and_a_backward_serve_all_steps(answers):
    assert answers["adamw"]["programs"] == 2
    assert answers["sgd"]["programs"] == 0  # the same graphs, of another model


def test_repeated_layers_are_compiled_once(answers):
    assert max(answers["repeated_layers"]["loss"], answers["repeated_layers"]["weights"]) < CLOSE
    assert answers["repeated_layers"]["programs"] == 6


@pytest.mark.slow
def test_a_large_head_is_computed_by_blocks_of_classes():
    (answer,) = _asked("a_head_by_blocks").values()
    assert answer["rewritten"] == 2
    assert answer["difference"] < CLOSE


@pytest.mark.slow
def test_stock_goes_wrong_from_the_third_step():
    first, second, *others = _asked("stock")["stock"]
    assert max(first, second) < 1e-6
    assert min(others) > 5e-6
    assert max(others) > 1e-3


def test_a_batch_that_cannot_be_shared_evenly(answers):
    assert max(answers["uneven_batch"]["loss"], answers["uneven_batch"]["weights"]) < CLOSE


@pytest.mark.slow
def test_a_batch_of_fewer_rows_than_devices():
    (answer,) = _asked("fewer_rows_than_devices").values()
    assert max(answer["loss"], answer["weights"]) < CLOSE


def test_weights_that_their_user_shards_stay_so(answers):
    answer = answers["weights_that_their_user_shards"]
    assert max(answer["loss"], answer["weights"]) < CLOSE
    assert answer["sharding"] == "{devices=[4,1]0,1,2,3}"


def test_weights_that_a_checkpoint_is_loaded_into_stay_sharded(answers):
    """Also where the load fails midway, and what was there is given back."""
    before, after, apart, given_back, apart_then = answers["a_checkpoint_that_is_loaded"]
    sharded = [i for i, was in enumerate(before) if was != NOT_YET_SENT]
    assert [before[i] for i in sharded] == [ROWS, "{devices=[1,4]0,1,2,3}"]
    assert [after[i] for i in sharded] == [given_back[i] for i in sharded] == [before[i] for i in sharded]
    assert (apart, apart_then) == (0, 0)


def test_a_whole_step_is_one_graph(answers):
    assert max(answers["a_whole_step"].values()) < CLOSE


def test_each_device_works_on_its_rows(answers):
    assert answers["what_the_devices_hold"] == [[WHOLE, WHOLE, ROWS], [ROWS, WHOLE, ROWS]]


def test_a_batch_is_sent_in_parts(answers):
    shardings = [ROWS, "{devices=[4]0,1,2,3}", NOT_YET_SENT, NOT_YET_SENT]
    assert answers["a_batch_that_is_sent_in_parts"] == [shardings, True, "cpu"]


def test_normalizations_are_cut_as_well(answers):
    for sharding, difference in answers["normalizations"]:
        assert sharding.startswith("{devices=[4,1,1]")
        assert difference < CLOSE


def test_maxima_over_devices_carry_a_nan_on(answers):
    assert answers["maxima_of_nan"] == [True] * 6


def test_sharded_tensors_are_written_to_by_index(answers):
    assert all(difference < CLOSE for difference in answers["writes_by_index"])


def test_sharded_rows_are_padded_by_what_is_cut(answers):
    assert all(difference < CLOSE for difference in answers["pads_that_cut"])


def test_fourier_transforms_and_windows(answers):
    assert answers["transforms"] < 1e-4  # gradients of up to 100
    assert answers["transform_of_a_divided_dimension"] < 1e-4


def test_searches(answers):
    assert answers["searches"] == [True, True]


def test_saved_values_next_to_a_cpu_operator_keep_their_shards(answers):
    assert answers["saved_beside_the_cpu"] < CLOSE


def test_sharded_tensors_are_reduced_to_booleans(answers):
    """XLA:CPU has no reduction between devices for torch_xla 2.9's computation of numbers."""
    assert answers["reductions_to_booleans"] == [True] * 5


def test_a_model_that_is_wrapped_again_has_the_new_mesh(answers):
    assert answers["wrapped_twice"] == [1, "{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}"]


def test_a_model_that_was_compiled_before_shares_its_batch(answers):
    assert answers["wrapped_after_it_was_compiled"] == [WHOLE, ROWS]


def test_copies_of_a_wrapped_model_share_theirs(answers):
    assert answers["copies_of_a_wrapped_model"] == [ROWS, 1]


def test_wrapped_models_of_a_class_share_what_was_captured(answers):
    assert answers["models_of_a_class_are_captured_once"] == 1


def test_inputs_that_are_no_batch_stay_whole(answers):
    assert answers["inputs_of_several_kinds"][1] == 0
    assert answers["a_model_without_tensors"] == [1, 1, 1]


def test_a_mesh_of_two_axes(answers):
    assert answers["a_mesh_of_two_axes"][1] < CLOSE


def test_another_sharding_is_another_program(answers):
    assert answers["another_sharding_is_another_program"] == [1, 1, 1, 0, 0]
    assert answers["a_tensor_that_is_sharded_anew"] == [
        ["{devices=[4]0,1,2,3}", True], [WHOLE, True], ["{devices=[4]0,1,2,3}", True],
    ]  # fmt: skip


def test_a_tensor_keeps_its_sharding_whatever_its_mark(answers):
    assert answers["a_tensor_that_has_lost_its_mark"] == [True, True]


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (
            "a_model_that_was_wrapped_for_other_devices",
            "TPUDistributedError: mesh_shape=(8,) is invalid: there are 4 devices",
        ),
        ("a_mesh_that_is_a_number", "TPUDistributedError: mesh_shape=4 is invalid: there are 4 devices. Allowed: ints"),
        (
            "a_mesh_that_does_not_fit",
            "TPUDistributedError: mesh_shape=(3,) is invalid: there are 4 devices. Allowed: ints",
        ),
        ("single_is_asked_for", "TPUDistributedError: topology=SINGLE in a job of 1 process(es) with 4 device(s)"),
        ("a_public_mark_inside_a_graph", "TPUDistributedError: mark_sharding of torch_xla is called inside"),
    ],
)
def test_what_is_refused(answers, question, words):
    assert words in answers[question]


def test_what_mark_sharding_returns_cannot_be_traced(answers):
    limit = next(known for known in KNOWN_LIMITS if "mark_sharding` returns" in known.what)
    assert "the tensor that you marked" in limit.cure
    assert "no attribute '_local_tensor'" in answers["a_tensor_of_torch_xlas_subclass"]
    assert answers["another_sharding_is_another_program"]  # which goes on with the tensors that were marked


def test_the_object_api_knows_of_the_devices(answers):
    answer = answers["what_the_object_api_says"]
    stats = {name: answer["stats"][name] for name in ("device", "devices", "num_devices", "is_spmd", "world_size")}
    assert stats == {"device": "xla:0", "devices": ["xla:0"], "num_devices": 4, "is_spmd": True, "world_size": 1}
    assert answer["backend"] == ["xla:0", 1, 0, 4]
    assert answer["training"] == [False, [4]]


def test_collectives_are_between_processes(answers):
    assert answers["collectives"] == [list(range(8))] * 2


def test_a_model_on_the_cpu_is_placed(answers):
    assert answers["a_model_on_the_cpu"] < CLOSE


def test_dropout_draws_what_one_device_draws(answers):
    drawn, is_repeated, is_repeatable = answers["dropout"]
    assert (is_repeated, is_repeatable) == (False, True)
    torch.manual_seed(5)
    assert compiled(lambda x: F.dropout(x, 0.3))(torch.ones(8, 6, device="xla")).tolist() == drawn


def test_an_operator_that_runs_on_the_cpu(answers):
    assert max(answers["an_operator_on_the_cpu"]) < CLOSE


def test_marks_inside_a_graph(answers):
    assert answers["marks_inside_a_graph"] == [[ROWS, True]] * 2
    assert answers["a_public_mark_that_dynamo_leaves_alone"] == ["{devices=[1,4]0,1,2,3}", True]


def test_a_buffer_in_uneven_parts_is_kept(answers):
    assert answers["uneven_parts_are_not_donated"] == [0, 4, 8, 12, 16, 20]


def test_a_donated_buffer_keeps_its_sharding(answers):
    assert answers["donated_buffers"] == [True, ROWS]


def test_lengths_that_are_padded(answers):
    difference, num_programs = answers["lengths_that_are_padded"]
    # One program a bucket. A tensor that fills its bucket is the user's own, and lies as one that was padded.
    assert (difference < CLOSE, num_programs) == (True, 2)


def test_an_export_is_for_one_chip(answers):
    num_marks, num_shardings, num_layer_norms = answers["what_is_compiled_for_one_chip"]
    assert (num_marks, num_shardings) == (0, 0)
    assert num_layer_norms >= 2


def test_evicted_programs_compile_again(answers):
    assert answers["programs_that_were_let_go"] == [True, True]


@pytest.mark.parametrize(
    ("platform", "chip"),
    [("PJRT C API\nTFRT TPU v5 lite\nBuilt on Jul 1 2025", "v5e"), ("PJRT C API\nTFRT TPU v4\ncl/1", "v4")],
)
def test_the_chip_behind_the_device_that_stands_for_all(monkeypatch, platform, chip):
    asked = types.SimpleNamespace(_xla_device_kind=None, _xla_get_platform_version=lambda: platform)
    monkeypatch.setattr(chips, "device_kind", lambda: "TPU")
    monkeypatch.setattr(xla, "began_with_spmd", lambda: True)
    monkeypatch.setattr(xla, "xlac", lambda: asked)
    assert chips.chip_name() == chip
    asked._xla_get_platform_version = lambda: "something else"
    with pytest.raises(TPUDeviceError, match=r"the device 'TPU' is unknown\. Known: TPU v4"):
        chips.chip_name()


def test_an_earlier_version_is_not_asked_for_several_devices(monkeypatch):
    monkeypatch.setattr(environment, "earlier_version", lambda: "2.8.0")
    with pytest.raises(TPUDistributedError, match=r"topology=POD with torch_xla 2\.8\.0.*Allowed: torch_xla 2\.9"):
        environment.start_device(TPUConfig(topology="pod"))


TOO_LATE = """
import torch, torch_xla
from kp_dynamo import TPUConfig, TPUDistributedError, create_xla_integration
torch.ones(2, device="xla")
try:
    create_xla_integration(TPUConfig(topology="pod"))
except TPUDistributedError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_device_that_was_used_before_is_too_late():
    assert "before anything uses a device" in run_script(TOO_LATE, {"CPU_NUM_DEVICES": "4"})


AUTOMATIC = """
import torch, torch_xla, torch_xla.runtime
torch_xla.runtime.use_spmd(auto=True)
try:
    torch.compile(lambda x: x * 3, backend="kp_tpu")(torch.ones(2))
except Exception as error:
    print(type(error.inner_exception).__name__, error.inner_exception)
"""


def test_shardings_that_xla_would_choose_are_refused():
    told = run_script(AUTOMATIC, {"CPU_NUM_DEVICES": "4"})
    assert told.startswith("TPUDistributedError use_spmd(auto=True) is unsupported: ")


SWITCHED_ON_LATE = """
import torch, torch_xla, torch_xla.runtime
from kp_dynamo import TPUBackend
x = torch.arange(8.0, device="xla")
double = torch.compile(lambda x: x * 2, backend="kp_tpu")
double(x)
torch_xla.runtime.use_spmd()
for use in (lambda: torch.compile(lambda x: x * 3, backend="kp_tpu")(x), TPUBackend):
    try:
        use()
    except Exception as error:
        failed = getattr(error, "inner_exception", error)
        print(type(failed).__name__, failed)
"""


@pytest.mark.slow
def test_a_switch_that_comes_too_late_is_named():
    lines = run_script(SWITCHED_ON_LATE, {"CPU_NUM_DEVICES": "4"}).splitlines()
    assert ["before anything uses a device" in line for line in lines] == [True, True]
    assert [line.split()[0] for line in lines] == ["TPUDistributedError"] * 2
