"""Models of the zoo, compiled against eager: float32 to rounding, bf16 levels against autocast's own error."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable
from functools import cache, lru_cache
from typing import Any

import pytest
import torch

from tests.zoo.__main__ import blocks_cell, documented, documented_ledger
from tests.zoo.harness import AUTOCAST, EAGER, FLOAT64, RUNS, Result, Setting, counted, divided, over_seeds, steps
from tests.zoo.models import BY_NAME, ZOO

LEVELS = ("conservative", "balanced", "aggressive")
# Rounding of float32 through some forty layers; the models here show 1e-7 to 1e-6.
FLOAT32_ERROR = 1e-5
# Of the error that eager autocast makes itself.
AUTOCAST_SHARE = 1.1

# Dynamo (2.9) makes an instance of torch's own autograd.Function where a mask of transformers is vmapped.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    # It looks at `.grad` of what a graph break hands on, here between Mixtral's experts.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


# What `make test` runs; `make test-all` runs the rest. Training holds the forward of inference too, so inference is
# quick for few models. Mixtral and resnet18 take 13 s to train, and resnet18 takes minutes in bfloat16 on XLA:CPU.
# Llama and bert train at a level below, and llama in float32 on XLA tensors.
QUICK_IN_FLOAT32 = {("t5", "infer"), ("resnet18", "infer")}
QUICK_AT_LEVELS = {
    ("llama", "balanced", "train"),
    ("bert", "aggressive", "train"),
}


QUICK_DIVIDED = {("llama", "train")}


def cases(quick: Container[tuple[str, ...]], *parts: Iterable[str]) -> list[Any]:
    """Every combination of a model's name and these parts; slow but for the quick ones."""
    every = itertools.product([m.name for m in ZOO], *parts)
    return [pytest.param(*case, marks=[] if case in quick else [pytest.mark.slow]) for case in every]


@lru_cache(maxsize=len(RUNS))
def float64_reference(name: str, run: str) -> Result:
    """Eager's result in float64 over all seeds, kept for all levels of a model."""
    return over_seeds(run, BY_NAME[name], FLOAT64)


@cache
def autocast_errors(name: str, run: str) -> dict[str, float]:
    return over_seeds(run, BY_NAME[name], AUTOCAST).errors(float64_reference(name, run))


def level(name: str) -> Setting:
    return Setting(backend="kp_tpu", options=(("level", name),))


@pytest.mark.parametrize(("name", "run"), cases(QUICK_IN_FLOAT32, RUNS))
def test_float32_is_eager_up_to_rounding(name: str, run: str) -> None:
    setting = Setting(backend="kp_tpu", options=(("precision", "float32"),))
    result, counts = counted(lambda: RUNS[run](BY_NAME[name], setting))
    eager = RUNS[run](BY_NAME[name])
    errors = result.errors(eager)
    assert max(errors.values()) <= FLOAT32_ERROR, errors
    assert result.gradients_off(eager, RUNS[run](BY_NAME[name], FLOAT64), FLOAT32_ERROR) == {}
    assert not counts.fallbacks
    assert counts.graphs > 0
    assert bool(counts.graph_breaks) <= BY_NAME[name].breaks, counts


@pytest.mark.parametrize(("name", "run"), cases(QUICK_DIVIDED, RUNS))
def test_divided_models_are_the_whole_ones_up_to_rounding(name: str, run: str) -> None:
    """The blocks are those of docs/zoo.md. Divided, a model rounds elsewhere than whole, by as much as both are off."""
    result, found = divided(RUNS[run], BY_NAME[name])
    assert blocks_cell(found) == documented()[name, run]["blocks"]
    whole = RUNS[run](BY_NAME[name], Setting("kp_tpu", (("precision", "float32"), ("blocks", "off"))))
    errors, of_whole = result.errors(whole), whole.errors(RUNS[run](BY_NAME[name], FLOAT64))
    assert all(errors[part] <= max(1e-6, 2 * of_whole[part]) for part in errors), (errors, of_whole)


def test_every_model_is_documented() -> None:
    every = [(model.name, run) for model in ZOO for run in RUNS]
    assert list(documented()) == every
    assert list(documented_ledger()) == every


@pytest.mark.parametrize(("name", "level_name", "run"), cases(QUICK_AT_LEVELS, LEVELS, RUNS))
def test_levels_err_no_more_than_autocast(name: str, level_name: str, run: str) -> None:
    allowed = autocast_errors(name, run)
    result, _ = counted(lambda: over_seeds(run, BY_NAME[name], level(level_name)))
    errors = result.errors(float64_reference(name, run))
    assert all(errors[part] <= AUTOCAST_SHARE * allowed[part] + FLOAT32_ERROR for part in errors), (errors, allowed)


@pytest.mark.parametrize("run", [pytest.param("infer", marks=pytest.mark.slow), "train"])
@pytest.mark.parametrize("name", ["llama", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_float32_on_xla_tensors(name: str, run: str) -> None:
    setting = Setting(backend="kp_tpu", options=(("precision", "float32"),), device="xla")
    result, _ = counted(lambda: RUNS[run](BY_NAME[name], setting))
    errors = result.errors(RUNS[run](BY_NAME[name]))
    assert max(errors.values()) <= FLOAT32_ERROR, errors


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_tied_weights_stay_tied_and_train(name: str, device: str) -> None:
    """A copy of a tied weight would get half of its gradient, and each half would go its own way."""
    wanted, _ = steps(BY_NAME[name], EAGER)
    got, tied = steps(BY_NAME[name], Setting("kp_tpu", (("precision", "float32"),), device=device))
    assert tied
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=0)
