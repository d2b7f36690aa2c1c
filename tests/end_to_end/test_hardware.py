"""The table of chips: every figure has a source, and those that follow from others do."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

import pytest

from kp_dynamo.aot.worker import TOPOLOGIES
from kp_dynamo.compat.chips import _CHIP_OF_KIND
from kp_dynamo.config.options import Target
from kp_dynamo.config.tpu_config import TPUVersion
from kp_dynamo.hardware import CHIPS, GB, Chip, memory_budget_bytes

pytestmark = pytest.mark.compat

FIGURES = [f.name for f in fields(Chip) if f.name not in ("name", "sources", "notes")]


@pytest.mark.parametrize(
    "named",
    [
        pytest.param(set(get_args(Target)) - {"auto"}, id="config/options.py: Target"),
        pytest.param({version.value for version in TPUVersion} - {"auto"}, id="config/tpu_config.py: TPUVersion"),
        pytest.param(set(_CHIP_OF_KIND.values()), id="compat/chips.py: _CHIP_OF_KIND"),
        pytest.param(set(TOPOLOGIES), id="aot/worker.py: TOPOLOGIES"),
    ],
)
def test_every_list_of_chips_has_them_all(named):
    assert named == set(CHIPS)


@pytest.mark.parametrize("name", CHIPS)
def test_every_figure_has_a_source(name):
    chip = CHIPS[name]
    without = [f for f in FIGURES if getattr(chip, f) is not None and not chip.sources.get(f)]
    assert not without


@pytest.mark.parametrize("name", ["v4", "v5e", "v5p"])
def test_the_peak_follows_from_the_matrix_units(name):
    chip = CHIPS[name]
    peak = chip.clock_hz * chip.num_cores * chip.num_mxus * chip.mxu_size**2 * 2
    assert peak == pytest.approx(chip.bf16_flops, rel=0.005)


@pytest.mark.parametrize("name", ["v6e", "v7"])
def test_a_clock_that_does_not_fit_the_peak_is_noted(name):
    assert any("clock" in note.lower() for note in CHIPS[name].notes)


def test_v7_has_the_vendors_memory_and_says_so():
    chip = CHIPS["v7"]
    assert chip.hbm_bytes == 192 * 2**30
    assert any("128 GB is not followed" in note for note in chip.notes)


def test_an_override_of_the_memory_wins_and_is_named_as_one():
    chip = CHIPS["v7"].with_memory(128)
    assert chip.hbm_bytes == 128 * GB
    assert chip.sources["hbm_bytes"] == "the user's configuration"
    assert CHIPS["v7"].hbm_bytes == 192 * 2**30


def test_a_budget_is_a_share_of_the_memory_or_the_users_figure():
    chip = CHIPS["v5e"]
    assert memory_budget_bytes(chip, 0.5, None) == 8 * GB
    assert memory_budget_bytes(chip, 0.5, 3.0) == 3 * GB
