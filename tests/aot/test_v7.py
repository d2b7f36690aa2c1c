"""v7, whose chips are two devices: memory, peak and price in a report, and programs of its compiler."""

from __future__ import annotations

import os
from functools import cache, partial

import pytest
import torch
from torch import nn

from kp_dynamo.aot.compiling import aot_compile
from kp_dynamo.aot.report import AotReport
from kp_dynamo.aot.request import Machine, request_of
from kp_dynamo.aot.worker_process import python_for
from kp_dynamo.cli.main import main
from kp_dynamo.exceptions import TPUConfigurationError, TPUNotAvailableError
from kp_dynamo.graph.least_memory import MemoryBudget
from kp_dynamo.hardware import CHIPS, DEVICES, GIB
from tests.aot.test_flash_attention import OPTIONS, Attention, D, H, S

WIDTH, ROWS = 1024, 4096
WEIGHT = WIDTH * 4 * WIDTH
BIASES = 5 * WIDTH


def _has_compiler() -> bool:
    try:
        return os.access(python_for("v7"), os.X_OK)
    except TPUNotAvailableError:
        return False


needs_compiler = pytest.mark.skipif(not _has_compiler(), reason="the compiler for v7 is not installed: make aot-v7")


def mlp() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


@cache
def report(chips: int | None) -> AotReport:
    args, sharding = (torch.empty(ROWS, WIDTH, device="meta"),), None if chips is None else "fsdp"
    return aot_compile(
        mlp(), args, target="v7", chips=chips, sharding=sharding, train=True, options={"level": "aggressive"}
    )


def test_a_device_is_half_a_chip_on_v7_and_a_chip_elsewhere():
    chip, device = CHIPS["v7"], DEVICES["v7"]
    assert (device.hbm_bytes, device.num_cores, device.num_devices) == (96 * GIB, 1, 1)
    for name in ("hbm_bytes", "hbm_bytes_per_s", "bf16_flops", "fp8_flops", "ici_bytes_per_s", "usd_per_hour"):
        assert getattr(device, name) * 2 == getattr(chip, name)
    for name in ("num_mxus", "mxu_size", "vmem_bytes", "clock_hz", "notes"):
        assert getattr(device, name) == getattr(chip, name)
    assert all(DEVICES[name] is CHIPS[name] for name in CHIPS if name != "v7")


def test_a_program_may_use_the_memory_of_its_devices():
    x = (torch.empty(64, WIDTH, device="meta"),)
    one = request_of(mlp(), x, Machine("v7"), None, "kp_tpu", False)
    assert one.memory_budget_bytes == pytest.approx(0.9 * 96 * GIB)
    slice_of_16 = request_of(mlp(), x, Machine("v7", 16, None, "fsdp"), None, "kp_tpu", False)
    assert slice_of_16.memory_budget_bytes == pytest.approx(0.9 * 96 * GIB)
    assert slice_of_16.options.memory_budget_bytes == pytest.approx(0.9 * 16 * 192 * GIB)
    assert slice_of_16.options.spread.num_chips == 32


@pytest.mark.parametrize(
    ("target", "num_devices", "text"),
    [
        ("v7", 1, "103.08 GB of half a v7"),
        ("v7", 32, "3298.53 GB of 16 v7 together"),
        ("v5e", 1, "16.00 GB of a v5e"),
        ("v5e", 16, "256.00 GB of 16 v5e together"),
    ],
)
def test_a_refused_program_says_whose_memory_it_exceeds(target, num_devices, text):
    assert MemoryBudget(DEVICES[target], 0.0, "off", num_devices).of_what == text


@needs_compiler
def test_fsdp_gathers_weights_in_bfloat16_and_scatters_gradients():
    forward, backward = report(4).programs
    # Of 8 devices: parts of two float32 weights and of the input, whole biases.
    assert forward.argument_bytes == (2 * WEIGHT + ROWS * WIDTH) * 4 / 8 + BIASES * 4
    found = {(p.name, row.kind): row for p in (forward, backward) for row in p.collectives}
    assert {row.axes for row in found.values()} == {"data"}
    assert found["1.forward", "all-gather"].num_bytes == 2 * WEIGHT * 2
    assert found["1.backward", "all-gather"].num_bytes == WEIGHT * 2
    assert found["1.backward", "reduce-scatter"].num_bytes == 2 * WEIGHT * 4
    assert found["1.backward", "all-reduce"].num_bytes == BIASES * 4
    # Three of four parts enter a chip, over two links of 100 GB/s.
    assert found["1.forward", "all-gather"].link_ms == pytest.approx(2 * WEIGHT * 2 * 3 / 4 / 2e11 * 1e3)


@needs_compiler
def test_figures_are_those_of_a_device_and_the_price_is_that_of_the_chips():
    found = report(4)
    assert (found.num_chips, found.num_devices, found.slice.mesh) == (4, 8, "data=8")
    assert found.model_flops == 5 * 2 * ROWS * WEIGHT // 8  # no gradient of the input
    assert found.flops_floor_ms == pytest.approx(found.model_flops / (2307e12 / 2) * 1e3)
    assert found.usd_per_hour == 4 * CHIPS["v7"].usd_per_hour
    text = found.text()
    assert text.startswith("training step on 4 v7 (2x2x1, 1 host, 8 devices), mesh data=8, sharding fsdp,")
    assert "communication of one device in a step" in text
    assert "allowed are 88474 of 98304 MiB" in " ".join(text.split())
    assert "A device waits" in found.to_html()


@needs_compiler
def test_without_chips_it_is_half_a_chip():
    found = report(None)
    assert (found.num_chips, found.num_devices, found.usd_per_hour) == (1, 1, CHIPS["v7"].usd_per_hour / 2)
    assert found.programs[0].argument_bytes == (2 * WEIGHT + ROWS * WIDTH) * 4 + BIASES * 4
    assert found.model_flops == 8 * report(4).model_flops
    assert found.text().startswith("training step on half a v7 through kp_tpu")
    assert "A chip is two devices." in found.text()
    assert found.memory_budget_bytes == pytest.approx(0.9 * 96 * GIB)


@needs_compiler
def test_the_command_compiles_for_both_devices_of_each_chip(tmp_path, capsys):
    spec = tmp_path / "model.py"
    spec.write_text(
        "import torch\nfrom torch import nn\n\ndef make():\n    with torch.device('meta'):\n"
        "        model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))\n"
        "        return model, (torch.empty(256, 512),)\n"
    )
    mesh = ["--mesh", "data=16,model=2", "--sharding", "tensor"]
    assert main(["aot", f"{spec}:make", "--target", "v7", "--chips", "16", *mesh]) == 0
    printed = capsys.readouterr().out
    assert "16 v7 (2x2x4, 4 hosts, 32 devices), mesh data=16,model=2" in printed
    assert "all-reduce" in printed


@needs_compiler
def test_a_batch_divides_among_the_devices():
    with pytest.raises(TPUConfigurationError, match="a batch of 12 does not divide among 8 devices along 'data'"):
        aot_compile(mlp(), (torch.empty(12, WIDTH, device="meta"),), target="v7", chips=4, sharding="data")


@needs_compiler
@pytest.mark.slow
def test_each_device_computes_its_own_sequences_in_a_pallas_kernel():
    compile_ = partial(aot_compile, Attention(), target="v7", train=True, options=OPTIONS)
    one = compile_((torch.ones(1, S, H * D),))
    eight = compile_((torch.ones(8, S, H * D),), chips=4, sharding="data")
    for alone, divided in zip(one.programs, eight.programs, strict=True):
        of_one, of_eight = (sorted(call.flops for call in p.custom_calls) for p in (alone, divided))
        assert of_eight == of_one != []
    assert {row.kind for row in eight.collectives} == {"all-reduce"}  # of the gradients
