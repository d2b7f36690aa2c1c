"""Programs for several chips, compiled by the TPU compiler."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from torch import nn

from kp_dynamo.aot.compiling import aot_compile
from kp_dynamo.aot.difference import compare
from kp_dynamo.aot.report import AotReport
from kp_dynamo.aot.request import Machine, request_of
from kp_dynamo.cli.main import main
from kp_dynamo.hardware import CHIPS, Spread
from kp_dynamo.passes.fuse_linear_cross_entropy import FuseLinearCrossEntropy
from kp_dynamo.pipeline import build_pipeline
from tests.cross_entropies import fuse_small_heads

MIB = 2**20


def mlp(width: int = 512) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


@cache
def inference_report() -> AotReport:
    args = (torch.empty(1024, 512, device="meta"),)
    sharding = {"0": "colwise", "2": "rowwise"}
    return aot_compile(mlp(), args, target="v5e", chips=4, mesh={"data": 2, "model": 2}, sharding=sharding)


def test_a_divided_matmul_sums_over_the_model_axis():
    report = inference_report()
    [program] = report.programs
    # Float32: half of both weights and of the first bias, the second bias, half of the input.
    expected = (2 * 512 * 2048 / 2 + 2048 / 2 + 512 + 1024 * 512 / 2) * 4
    assert program.argument_bytes == pytest.approx(expected, rel=0.01)
    assert program.output_bytes == 1024 * 512 / 2 * 4
    [row] = report.collectives
    assert (row.kind, row.axes, row.count) == ("all-reduce", "model", 1)
    assert row.num_bytes in (512 * 512 * 2, 512 * 512 * 4)  # a sum in bfloat16 or float32
    assert row.link_ms == pytest.approx(2 * row.num_bytes / 2 / 5e10 * 1e3)
    assert 0 <= row.exposed_ms <= row.link_ms * 1.001
    assert program.model_flops == 2 * 2 * 1024 * 512 * 2048 / 4


def test_a_step_is_compute_and_exposed_communication():
    report = inference_report()
    assert report.step_ms == report.modelled_ms + report.exposed_ms
    assert report.mfu == pytest.approx(report.flops_floor_ms / report.step_ms)
    per_hour = 4 * CHIPS["v5e"].usd_per_hour
    assert report.usd_per_million_steps == pytest.approx(per_hour * report.step_ms * 1e6 / 3.6e6)
    assert report.tokens_per_s is None


def test_the_report_says_what_the_chips_are():
    text = inference_report().text()
    assert text.startswith("inference on 4 v5e (2x2, 1 host), mesh data=2,model=2, sharding {'0': 'colwise',")
    assert "communication of one chip in a step" in text
    assert "causal attention counts in full" in text
    assert "whole on every chip" not in text


def test_the_report_survives_json():
    report = inference_report()
    again = AotReport.from_dict(json.loads(json.dumps(report.to_dict())))
    assert again == report
    assert again.collectives == report.collectives


def test_two_reports_of_several_chips_compare_the_time_of_a_step():
    report = inference_report()
    found = compare(report, report)
    assert {"step_ms", "exposed_ms"} <= {d.figure for d in found.differences}
    assert found.remarks == ()


def test_the_command_line_compiles_for_several_chips(tmp_path, capsys):
    (tmp_path / "spec.py").write_text(
        "import torch\ndef make():\n"
        "    model = torch.nn.Sequential(torch.nn.Embedding(512, 128), torch.nn.Linear(128, 512))\n"
        "    return model, (torch.zeros(8, 128, dtype=torch.long),)\n"
    )
    arguments = ["--target", "v5e", "--chips", "2x2", "--mesh", "data=2,model=2", "--json", str(tmp_path / "a.json")]
    sharding = ["--sharding", '{"0": [null, "data"], "1": "colwise"}']
    assert main(["aot", f"{tmp_path / 'spec.py'}:make", *arguments, *sharding]) == 0
    assert "on 4 v5e (2x2, 1 host), mesh data=2,model=2" in capsys.readouterr().out
    report = AotReport.from_dict(json.loads((tmp_path / "a.json").read_text()))
    assert report.num_tokens == 1024
    assert report.tokens_per_s == pytest.approx(1024 / report.step_ms * 1e3)


def test_passes_know_how_many_chips_share_the_work():
    args, machine = (torch.empty(1024, 512, device="meta"),), Machine("v5e", 16, {"data": 4, "model": 4}, "fsdp")
    options = request_of(mlp(), args, machine, None, "kp_tpu", train=True).options
    assert options.spread == Spread(16, 4, 4)
    [loss] = [p for p in build_pipeline(options) if isinstance(p, FuseLinearCrossEntropy)]
    assert loss.batch_parts == 4


class Head(nn.Module):
    """A head without bias, and its loss."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, num_classes, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(x), target)


def collectives_of_a_head(rows: int, width: int, num_classes: int, chips: int) -> list[dict]:
    """Of its forward and its backward, by kind."""
    with torch.device("meta"):
        head, args = Head(width, num_classes), (torch.empty(rows, width), torch.empty(rows, dtype=torch.long))
    report = aot_compile(head, args, target="v5e", chips=chips, sharding="fsdp", train=True)
    return [{row.kind: row for row in program.collectives} for program in report.programs]


@pytest.mark.slow
def test_a_head_by_blocks_is_gathered_once_and_its_gradient_summed_whole(monkeypatch):
    fuse_small_heads(monkeypatch)
    forward, backward = collectives_of_a_head(1024, 256, 512, chips=4)
    assert (forward["all-gather"].count, forward["all-gather"].num_bytes) == (1, 256 * 512 * 2)
    assert sum(row.num_bytes for kind, row in backward.items() if kind != "all-gather") >= 256 * 512 * 4
    assert {*forward, *backward} <= {"all-gather", "all-reduce", "reduce-scatter"}


@pytest.mark.slow
def test_a_head_in_one_block_moves_its_weight_and_not_the_gradient_of_its_logits():
    weight = 512 * 32000
    forward, backward = collectives_of_a_head(16384, 512, 32000, chips=8)
    assert forward["all-gather"].num_bytes == pytest.approx(2 * weight, rel=0.01)
    # The backward reads the exponentials that the forward saved, and no weight.
    assert backward["reduce-scatter"].num_bytes == pytest.approx(4 * weight, rel=0.01)
    assert sum(row.num_bytes for row in backward.values()) < 5 * weight


def test_weights_are_gathered_and_gradients_scattered_in_the_program_that_makes_them():
    args = (torch.empty(1024, 512, device="meta"),)
    report = aot_compile(mlp(), args, target="v5e", chips=4, mesh={"data": 4}, sharding="fsdp", train=True)
    forward, backward = report.programs
    [row] = forward.collectives
    assert (row.kind, row.axes, row.count) == ("all-gather", "data", 2)
    assert row.num_bytes == 2 * 512 * 2048 * 2  # bfloat16: they are cast before they are gathered
    assert row.link_ms == pytest.approx(row.num_bytes * 3 / 4 / 1e11 * 1e3)
    assert backward.output_bytes == pytest.approx(2 * 512 * 2048 * 4 / 4 + 2560 * 4, rel=0.01)
    rows = {row.kind: row for row in backward.collectives}
    assert rows["reduce-scatter"].num_bytes == 2 * 512 * 2048 * 4  # float32, as the parameters are
    assert report.slice.whole == ()


def test_gradients_summed_in_bfloat16_are_half_of_the_bytes():
    args, options = (torch.empty(1024, 512, device="meta"),), {"reduce_dtype": "bfloat16"}
    machine = {"target": "v5e", "chips": 4, "mesh": {"data": 4}, "sharding": "fsdp"}
    report = aot_compile(mlp(), args, train=True, options=options, **machine)
    backward = report.programs[1]
    rows = {row.kind: row for row in backward.collectives}
    assert rows["reduce-scatter"].num_bytes == 2 * 512 * 2048 * 2
    # The parameters and their gradients stay in float32.
    assert backward.output_bytes == pytest.approx(2 * 512 * 2048 * 4 / 4 + 2560 * 4, rel=0.01)


def test_gradients_that_are_exchanged_are_one_all_to_all_each():
    args, options = (
        (torch.empty(1024, 512, device="meta"),),
        {"reduce_dtype": "bfloat16", "reduce_scatter": "all_to_all"},
    )
    machine = {"target": "v5e", "chips": 4, "mesh": {"data": 4}, "sharding": "fsdp"}
    backward = aot_compile(mlp(), args, train=True, options=options, **machine).programs[1]
    rows = {row.kind: row for row in backward.collectives}
    assert (rows["all-to-all"].axes, rows["all-to-all"].count) == ("data", 2)
    assert rows["all-to-all"].num_bytes == 2 * 512 * 2048 * 2
    assert "reduce-scatter" not in rows
    # The biases and the gradient of the input; the gradients themselves stay in float32.
    assert sum(row.num_bytes for kind, row in rows.items() if kind == "all-reduce") < 2**16
    assert backward.output_bytes == pytest.approx(2 * 512 * 2048 * 4 / 4 + 2560 * 4, rel=0.01)


def test_the_peak_is_what_lives_at_once_and_not_all_temporaries_together():
    """The gradient of an embedding: zeros, and their sum with the rows of the tokens, which is summed in place."""
    with torch.device("meta"):
        embedding, tokens = nn.Embedding(20480, 4096), torch.empty(16, 2048, dtype=torch.long)
    report = aot_compile(embedding, (tokens,), target="v5e", chips=16, sharding="fsdp", train=True)
    table, grad = 20480 * 4096 * 4, 2048 * 4096 * 4
    backward = report.programs[1]
    assert backward.temp_bytes == 3 * table
    by_hand = 2 * table + grad + table / 16
    assert backward.peak_bytes == pytest.approx(by_hand + backward.generated_code_bytes, rel=0.02)
    assert AotReport.from_dict(report.to_dict()).programs[1].peak_bytes == backward.peak_bytes
