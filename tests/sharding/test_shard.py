"""`kp_dynamo.shard`: `tests/sharding/worker.py`, on eight of XLA's CPU devices, asks; the answers are judged here."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from kp_dynamo import TPUConfigurationError, TPUDistributedError, shard, shard_batch
from tests.sharding.asking import CLOSE, asked
from tests.sharding.model_cases import MODELS
from tests.spine import run_script

ROWS_OF_FOUR = "{devices=[4,1,2]0,1,2,3,4,5,6,7 last_tile_dim_replicate}"


@pytest.fixture(scope="module")
def answers():
    return asked()


def _assert_like_eager(answer, *, is_divided=True):
    assert isinstance(answer, dict), answer
    assert answer["gradients"] < CLOSE
    assert answer["loss"] < CLOSE
    assert len(set(answer["losses"])) == len(answer["losses"])  # it trains
    assert answer["misplaced"] == answer["moved"] == []
    assert (answer["divided"] > 0) == is_divided


def _assert_like_one_device(answer, *, is_divided=True):
    _assert_like_eager(answer, is_divided=is_divided)
    assert answer["sgd"] < CLOSE


@pytest.mark.parametrize("name", ["a_llama_by_data_and_matmuls", "a_masked_bert_by_parameters"])
def test_a_divided_model_is_trained_like_one_device(answers, name):
    _assert_like_eager(answers[name])
    assert answers[name]["programs"] == [2, 0, 0, 0, 0, 0]
    assert not any(answers[name]["compiled"][2:])


def test_a_program_may_return_values_of_six_dimensions(answers):
    assert len(answers["values_of_six_dimensions"]) == 8
    assert max(answers["values_of_six_dimensions"]) < 1e-5
    assert max(answers["batches_of_six_dimensions"]) < 1e-5


def test_a_model_writes_to_the_arguments_of_its_caller(answers):
    for *differences, has_own, keys in answers["writes_to_arguments"]:
        assert max(differences) < CLOSE
        assert (has_own, keys) == (True, ["state", "h"])


def test_batches_in_objects_are_divided_or_named(answers):
    rows = "{devices=[8,1]0,1,2,3,4,5,6,7}"
    assert answers["batches_in_objects"] == [[rows, rows]] * 2
    assert "TPUDistributedError: batch has tensors inside of a Batch, which" in answers["an_object_in_a_batch"]


def test_a_batch_is_known_by_the_names_of_transformers(answers):
    assert answers["a_batch_by_its_name"] == ["", "{devices=[8,1]0,1,2,3,4,5,6,7}"]


@pytest.mark.slow
def test_a_divided_model_generates_the_tokens_of_one_device():
    assert asked("generation")["generation"] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_all_shardings_of_a_model_train_it_like_one_device(name):
    answers = asked(*[f"{name}_{how}" for how in MODELS[name].shardings])
    for how, (mesh, _) in MODELS[name].shardings.items():
        answer = answers[f"{name}_{how}"]
        _assert_like_one_device(answer, is_divided=how != "data")
        # Where matmuls are divided, sums over features have another order too. Most seen: 2.5 and 16 (T5).
        assert answer["adamw"] < answer["adamw_permuted"] * (32 if "model" in mesh else 8), how
        # Mixtral's own code makes tensors whose sizes are the tokens of an expert. A size that another sharding, or
        # an earlier step, has met is not compiled again.
        if name != "mixtral":
            assert answer["programs"] == answer["programs_of_one"], how
            assert not any(answer["compiled"][3:]), how


@pytest.mark.slow
def test_a_llama_in_blocks_is_trained_like_one_device():
    _assert_like_one_device(asked("llama_blocks")["llama_blocks"])


@pytest.mark.slow
def test_a_model_without_a_plan_is_divided_by_its_pairs_of_matmuls():
    answer = asked("plain_pairs")["plain_pairs"]
    assert answer["divided"] == 10  # the weights and biases of q, k and v; out, up, gate, down


def test_each_device_holds_its_part(answers):
    divided, whole, are_equal, num_shards = answers["what_each_device_holds"]
    assert (divided, whole, are_equal) == ([[128, 32]], [[128, 128]], True)
    assert num_shards == 8 * 7


def test_a_batch_is_sent_in_parts(answers):
    # Rows along "data", the second axis of this mesh: its devices are 0 and 4, 1 and 5, ...
    rows = "{devices=[4,1,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}"
    assert answers["a_batch_in_parts"] == [rows, rows.replace("4,1,2", "4,2"), "", True]


def test_torch_xla_writes_placements_as_we_do(answers):
    for theirs, ours, is_equal in answers["the_devices_of_the_notation"]:
        assert theirs == ours
        assert is_equal


def test_a_mesh_of_torch_xla_keeps_its_devices(answers):
    weight, batch, difference = answers["a_mesh_of_torch_xla"]
    assert weight == "{devices=[2,1,4]1,3,5,7,0,2,4,6 last_tile_dim_replicate}"
    assert batch == "{devices=[4,1,2]6,7,4,5,2,3,0,1 last_tile_dim_replicate}"
    assert difference < CLOSE


@pytest.mark.slow
def test_a_model_is_divided_anew():
    before, *found, difference = asked("sharded_again")["sharded_again"]
    eighths = "{devices=[8,1]0,1,2,3,4,5,6,7}"
    columns = "{devices=[2,1,4]0,2,4,6,1,3,5,7 last_tile_dim_replicate}"
    assert [before, *found] == [eighths, eighths, columns, eighths, "{replicated}"]
    assert difference < CLOSE


@pytest.mark.slow
def test_gradients_that_accumulate_lie_as_their_parameters():
    was_trained, misplaced, difference = asked("accumulated_gradients")["accumulated_gradients"]
    assert (was_trained, misplaced) == (False, [])
    assert difference < CLOSE


def test_the_backward_divides_the_gradients_of_the_weights_that_it_reads(answers):
    found, difference = answers["gradients_of_weights_that_are_marked_by_hand"]
    assert set(found) == {"1.weight", "3.weight"}
    assert all(gradient == weight for gradient, weight in found.values())
    assert difference < CLOSE


def test_a_program_divides_the_gradients_of_all_that_it_was_given(answers):
    found, difference = answers["gradients_that_their_program_divides"]
    assert len({parameter for _, parameter in found.values()}) > 2
    assert all((gradient or "{replicated}") == (parameter or "{replicated}") for gradient, parameter in found.values())
    assert difference < CLOSE


def test_equal_backwards_whose_gradients_lie_in_other_ways_are_two_programs(answers):
    (divided, first), (by_columns, second) = answers["equal_backwards_with_other_gradients"]
    assert (divided, by_columns) == (first, second)
    assert first != second


def test_weights_are_gathered_where_all_devices_are_along_the_batch(answers):
    (along_batch, first), (other, second) = answers["weights_that_programs_gather"]
    # In the forward, in the backward, and as a gradient.
    assert along_batch == [[128, 256]] * 3 + [[256, 128]] * 3
    assert other == []
    assert max(first, second) < CLOSE


def test_gradients_of_matmuls_are_summed_in_bfloat16_on_request(answers):
    divided, exchanged, *same = answers["gradients_summed_in_bfloat16"]
    weights = {"1.weight", "3.weight"}
    # Each device rounds its part once, and a sum of eight parts at most three times on its longest way.
    assert all(0 < divided[name] < 4 * 2**-9 for name in weights)
    # In an exchange the sum itself is float32.
    assert all(0 < exchanged[name] < 2**-9 for name in weights)
    assert {found[name] for found in (divided, exchanged) for name in found if name not in weights} == {0}
    assert {difference for found in same for difference in found.values()} == {0}


@pytest.mark.slow
def test_gradients_are_exchanged_on_request():
    for divided, misplaced, difference in asked("gradients_summed_by_an_exchange")["gradients_summed_by_an_exchange"]:
        # The parts, by the chips that compute them, and then as the weight is divided.
        assert divided == [[8, 128, 256]] * 2 + [[8, 256, 128]] * 2
        assert misplaced == []
        assert difference < CLOSE


def test_results_of_inference_lie_along_the_batch(answers):
    even, other_length, uneven = answers["results_of_inference"]
    assert even[0] == other_length[0] == "{devices=[8,1,1]0,1,2,3,4,5,6,7}"
    assert max(even[1], other_length[1], uneven[1]) < CLOSE


def test_a_step_takes_the_programs_of_one_device(answers):
    assert answers["programs_of_each_step"] == [2, 0, 0, 0]  # a forward and a backward


def test_the_state_of_a_compiled_optimizer_lies_as_its_parameters(answers):
    misplaced, programs, difference = answers["state_of_a_compiled_optimizer"]
    assert misplaced == []
    assert programs == [3, 0, 0]
    assert difference < CLOSE


def test_the_memory_is_that_of_all_devices(answers):
    fits, refused = answers["memory_of_all_devices"]
    assert fits == [8, 16, 128]
    assert "GB of the 128.00 GB of 8 v5e together" in refused


def test_a_program_knows_how_many_chips_share_its_work(answers):
    assert answers["the_chips_of_a_program"] == [[8, 8, 1], [8, 4, 2]]


def test_a_miss_names_the_argument_and_the_result_that_lie_in_another_way(answers):
    [line] = [line for line in answers["a_miss_names_the_sharding"] if "sharding 1: " in line]
    assert "sharding 2: {devices=[2,4]0,2,4,6,1,3,5,7 last_tile_dim_replicate} -> {replicated}" in line
    assert "result_sharding 0: {devices=[4,2]0,1,2,3,4,5,6,7} -> {devices=[4,1,2]" in line


def test_models_of_the_object_api_are_divided(answers):
    columns, rows = "{devices=[2,1,4]0,2,4,6,1,3,5,7 last_tile_dim_replicate}", "{devices=[8,1]0,1,2,3,4,5,6,7}"
    found = answers["models_of_the_object_api"]
    places = [[weight, batch or "{replicated}"] for weight, batch, _ in found]
    assert places == [[columns, ROWS_OF_FOUR], [rows, rows], [rows, "{replicated}"]]
    assert max(answer[2] for answer in found) < CLOSE


@pytest.mark.slow
def test_an_optimizer_of_the_object_api_divides_the_model():
    weight, difference = asked("an_optimizer_of_the_object_api")["an_optimizer_of_the_object_api"]
    assert weight == "{devices=[8,1]0,1,2,3,4,5,6,7}"
    assert difference["gradients"] < 0.05  # of matmuls in bfloat16


@pytest.mark.slow
def test_grouped_convolutions_on_meshes_of_several_axes():
    assert max(asked("grouped_convolutions")["grouped_convolutions"].values()) < CLOSE


@pytest.mark.slow
def test_other_grouped_convolutions_on_meshes_of_several_axes():
    assert max(asked("more_grouped_convolutions")["more_grouped_convolutions"].values()) < CLOSE


def test_transforms_of_a_divided_model(answers):
    assert max(max(pair) for pair in answers["transforms"].values()) < CLOSE


def test_batch_norm_sees_the_whole_batch(answers):
    results, statistics, shardings = answers["batch_norm"]
    assert max(results, statistics) < CLOSE
    assert set(shardings) == {"{replicated}"}


def test_a_model_that_is_not_compiled(answers):
    misplaced, difference = answers["eager_without_compile"]
    assert misplaced == []
    assert difference < CLOSE


def test_two_models_may_lie_on_two_meshes(answers):
    *meshes, of_teacher, of_student = answers["two_models_on_two_meshes"]
    both, data = "data=4,model=2", "data=8"
    assert meshes == [both, both, data, data, both]
    assert max(of_teacher, of_student) < CLOSE


def test_two_models_may_lie_on_meshes_of_equal_sizes(answers):
    assert answers["two_meshes_of_equal_sizes"] < CLOSE


def test_a_loaded_state_leaves_the_parameters_divided(answers):
    assert answers["states_that_are_loaded"] == [[], 0]


def test_another_sharding_on_the_same_mesh_is_captured_again(answers):
    assert answers["sharded_otherwise_on_the_same_mesh"] == 2


def test_a_sharding_that_is_refused_changes_nothing(answers):
    assert answers["a_sharding_that_is_refused"] == [True, 0]


def test_large_tensors_that_stay_whole_are_named(answers):
    line = "sharding leaves large tensors whole on each of 8 chips: 0.weight (65 MiB)."
    assert answers["large_tensors_that_stay_whole"] == [line]


def test_explain_names_large_tensors_that_are_whole(answers):
    small_limit, is_in_text, usual_limit, _ = answers["what_explain_names"]
    assert small_limit == [["1.weight", [256, 64], 256 * 64 * 4]]
    assert is_in_text
    assert usual_limit == []


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (
            "a_mesh_of_too_few_devices",
            "TPUDistributedError: mesh=data=4 has 4 devices, but there are 8. Allowed: a mesh",
        ),
        ("a_mesh_of_too_many_devices", "TPUDistributedError: mesh=data=16 has 16 devices, but there are 8"),
        (
            "a_mesh_of_the_object_api_that_does_not_fit",
            "TPUDistributedError: mesh_shape=(4, 4) is invalid: there are 8 devices",
        ),
        ("a_mesh_without_names", "has no axis names. Allowed: the axes 'data' and 'model'. Try: Mesh(device_ids"),
        ("a_mesh_that_is_a_tuple", "TPUConfigurationError: mesh=(4, 2) is invalid: it is a tuple. Allowed: a dict"),
        ("a_batch_without_its_axis", "TPUConfigurationError: mesh=model=8 has no axis 'data'"),
        ("a_batch_without_tensors", "TPUDistributedError: batch contains no tensor, only int"),
        ("example_args_without_a_batch", "TPUConfigurationError: example_args has no tensor with a batch dimension"),
        ("an_input_on_the_cpu", "are on two devices: args.0 is on cpu, 0.weight is on xla:0"),
        ("no_module", "TPUModelPreparationError: model of type function is invalid"),
    ],
)
def test_what_is_refused(answers, question, words):
    assert words in answers[question]


ONE_DEVICE = """
import torch, kp_dynamo
from torch import nn
x, model = torch.randn(4, 8), nn.Linear(8, 8)
expected = model(x).detach()
kp_dynamo.shard(model, {"data": 1, "model": 1}, "fsdp")
result = model(kp_dynamo.shard_batch(x, {"data": 1}))
print(result.device.type, torch.allclose(result.detach().cpu(), expected, atol=1e-6))
"""


def test_on_one_device_the_model_is_only_moved():
    assert run_script(ONE_DEVICE, {"CPU_NUM_DEVICES": "1"}, timeout_s=300).split() == ["xla", "True"]


TOO_LATE = """
import torch, torch_xla, kp_dynamo
torch.ones(2, device="xla")
try:
    kp_dynamo.shard(torch.nn.Linear(8, 8), {"data": 4}, "data")
except kp_dynamo.TPUDistributedError as error:
    print(error)
"""


def test_a_device_that_was_used_before_is_too_late():
    assert "before anything uses a device" in run_script(TOO_LATE, {"CPU_NUM_DEVICES": "4"}, timeout_s=300)


SEVERAL_PROCESSES = """
import torch, kp_dynamo
torch.distributed.init_process_group("gloo", init_method="file://" + {file!r}, rank={rank}, world_size=2)
mesh, model = {{"data": 4}}, torch.nn.Linear(8, 8)
for use in (lambda: kp_dynamo.shard(model, mesh, "data"), lambda: kp_dynamo.shard_batch(torch.ones(4), mesh)):
    try:
        use()
    except kp_dynamo.TPUDistributedError as error:
        print(error)
"""


@pytest.mark.parametrize("example", [torch.zeros(8, 4), {"x": torch.zeros(8, 4)}, "batch"])
def test_an_example_is_a_tuple_of_arguments(example):
    with pytest.raises(TPUConfigurationError, match=r"example_args of type .* Allowed: a tuple .* such as \(batch,\)"):
        shard(nn.Linear(4, 4), {"data": 1, "model": 1}, "tensor", example_args=example)


def test_several_processes_are_refused(tmp_path):
    sources = [SEVERAL_PROCESSES.format(file=str(tmp_path / "meeting"), rank=rank) for rank in range(2)]
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
    started = [subprocess.Popen([sys.executable, "-c", s], env=environment, stdout=subprocess.PIPE) for s in sources]
    for process in started:
        lines = process.communicate(timeout=300)[0].decode().splitlines()
        printed = [line for line in lines if not line.startswith("[Gloo]")]
        assert len(printed) == 2
        assert all(line.startswith("mesh=data=4 in a job of 2 processes is unsupported: ") for line in printed)


def test_an_earlier_version_is_refused(monkeypatch):
    monkeypatch.setattr("kp_dynamo.api.sharded_model.earlier_version", lambda: "2.8.0")
    for use in (lambda: shard(nn.Linear(2, 2), {"data": 4}, "data"), lambda: shard_batch([1], {"data": 4})):
        with pytest.raises(TPUDistributedError, match=r"torch_xla 2\.8\.0 is untested and therefore refused"):
            use()
