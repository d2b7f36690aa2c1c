"""The predictions of docs/planner.md, and what they claim."""

from statistics import median

import pytest

from bench.published_runs import RUNS, scaled
from bench.report import last_rows
from bench.tables.published import FLAT, in_order, predictions


def times():
    return {r["run"]: (r["published s"], r["predicted s"]) for r in last_rows("published") if r["predicted s"]}


def test_a_run_is_predicted_by_the_other_runs_of_its_generation():
    names = [run.name for run in RUNS if run.target == "v6e"][:4]
    found = predictions({name: (1.0, 2.0 + i) for i, name in enumerate(names)})
    assert found[names[0]] == 2.0 * (1 / 4)  # 1/3, 1/4 and 1/5
    assert found[names[3]] == 5.0 * (1 / 3)


def test_a_generation_of_few_runs_is_predicted_by_all():
    v5e = next(run.name for run in RUNS if run.target == "v5e")
    v6e = [run.name for run in RUNS if run.target == "v6e"][:3]
    found = predictions({v5e: (1.0, 1.0), **dict.fromkeys(v6e, (1.0, 2.0))})
    assert found[v5e] == 0.5
    assert found[v6e[0]] == 1.0  # 1/1, 1/2 and 1/2


def test_the_recorded_predictions_are_close_and_in_order():
    found = times()
    predicted = predictions(found)
    errors = {name: abs(predicted[name] / seconds - 1) for name, (seconds, _) in found.items()}
    assert len(errors) == len(RUNS)
    assert median(errors.values()) <= 0.15
    assert max(errors.values()) <= 0.30
    right, pairs = in_order({name: seconds for name, (seconds, _) in found.items()}, predicted)
    assert right == pairs > 0
    speeds = [run.batch * run.length / predicted[run.name] for run in RUNS if run.model == FLAT]
    assert len(speeds) == 6
    assert max(speeds) / min(speeds) - 1 <= 0.05  # as flat as published


def test_the_sizes_of_maxtexts_models():
    assert [round(scaled(n).num_parameters / 1e9) for n in (16, 32, 64, 128)] == [16, 32, 63, 125]
    run = next(run for run in RUNS if run.model == "MaxText 16B")
    per_token = run.sizes.step_flops(1, 1) / 6
    assert per_token == pytest.approx(run.sizes.num_parameters - 32000 * 4096, rel=0.01)
