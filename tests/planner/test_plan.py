"""`plan` without compiles: bounds of a small model, its text and JSON, and its errors."""

from __future__ import annotations

import dataclasses
import datetime
import json
from functools import cache
from importlib.util import find_spec
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import kp_dynamo
from kp_dynamo.cli.main import main
from kp_dynamo.exceptions import (
    TPUConfigurationError,
    TPUModelPreparationError,
    TPUNotAvailableError,
    TPUOutOfMemoryError,
)
from kp_dynamo.hardware import CHIPS
from kp_dynamo.planner import code_lines, planning
from kp_dynamo.planner.batches import samples_of
from kp_dynamo.planner.bounds import Facts
from kp_dynamo.planner.candidates import layouts, sold
from kp_dynamo.planner.capture import BATCH, capture_step
from kp_dynamo.planner.fact_source import FactSource
from kp_dynamo.planner.plan_figures import PlanRow
from kp_dynamo.planner.planning import plan
from kp_dynamo.planner.request import Goal, plan_request
from kp_dynamo.planner.result import Plan
from kp_dynamo.planner.step_facts import Flops, activations, flops_per_sample, parameter_reads

WIDTH, LENGTH, VOCABULARY = 256, 512, 1024
TOKENS = (torch.zeros(4, LENGTH, dtype=torch.int64, device="meta"),)


class Model(nn.Module):
    """Tokens [B, S] -> the mean loss."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.down(nn.functional.gelu(self.up(x)))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def on_meta(width: int = WIDTH) -> nn.Module:
    with torch.device("meta"):
        return Model(width)


@cache
def found() -> Plan:
    return plan(on_meta(), TOKENS, train=True, tokens_per_step=64 * LENGTH, max_chips=16, tokens=1e9, num_compiled=0)


def test_flops_activations_and_reads_of_a_step():
    capture = capture_step(on_meta(), TOKENS, {"checkpoint": "off"}, train=True)
    matmuls = 2 * LENGTH * (2 * 4 * WIDTH * WIDTH + WIDTH * VOCABULARY)
    assert flops_per_sample(capture) == Flops(3 * matmuls, recomputed=0, least=3 * matmuls)
    reads = parameter_reads(capture)
    assert reads["embedding.weight"] == 1  # its backward reads only the tokens
    assert reads["head.weight"] == reads["up.weight"] == reads["down.weight"] == 2
    live = activations(capture, 1)
    # At the least the backward reads the hidden activations in bfloat16, and at the most each value a few times.
    hidden = LENGTH * 4 * WIDTH * 2
    one, eight = (max(a.per_sample * samples + a.fixed for a in live.live) for samples in (1, 8))
    assert hidden <= one < 20 * hidden + LENGTH * VOCABULARY * 20
    assert eight == pytest.approx(8 * one, rel=0.01)
    assert capture.args[0].shape[0] == BATCH


class Attending(nn.Module):
    """Tokens [B, S] -> the mean loss, by causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).unflatten(2, (4, -1)).transpose(1, 2)
        x = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).flatten(2)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def test_the_bound_of_matmuls_leaves_out_what_causal_attention_may_skip():
    with torch.device("meta"):
        model = Attending()
    flops = flops_per_sample(capture_step(model, TOKENS, {"checkpoint": "off"}, train=True))
    matmuls, whole = 3 * 2 * LENGTH * WIDTH * VOCABULARY, 3 * 2 * 2 * LENGTH**2 * WIDTH
    assert flops.total == matmuls + whole
    assert flops.least == matmuls + whole * (LENGTH + 1) // (2 * LENGTH)


LARGE_VOCABULARY = 32768


@pytest.mark.parametrize("vocabulary", [8000, LARGE_VOCABULARY])
def test_a_loss_saves_nothing_that_a_chip_may_not_keep(vocabulary):
    """The logits, or exponentials, that fit a chip or are not worth a pass for a few samples, and do for many."""
    with torch.device("meta"):
        model = Model(64)
        model.embedding, model.head = nn.Embedding(vocabulary, 64), nn.Linear(64, vocabulary)
    capture = capture_step(model, TOKENS, {"checkpoint": "off"}, train=True)
    assert max(a.per_sample for a in activations(capture, 1).live) < LENGTH * vocabulary
    matmuls = 3 * 2 * LENGTH * 64 * (2 * 4 * 64 + vocabulary)
    assert flops_per_sample(capture).least == matmuls


def test_what_is_too_small_for_a_pass_does_not_fail_under_strict():
    """The capture fuses small logits, and the compiled program does not."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(x) * self.scale, target)

    with torch.device("meta"):
        args = torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)
        found = plan(Scaled(), args, train=True, targets=["v5e"], max_chips=1, num_compiled=0, options={"strict": True})
    assert found.options == {"strict": True}


def test_repeated_layers_save_what_they_save_in_a_long_step():
    """A short step is not divided, and then saves two sums of each layer; a long one saves the input of each."""
    with torch.device("meta"):
        layers = (nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True) for _ in range(4))
        model = nn.Sequential(*layers, nn.Linear(64, 1))
    args = (torch.zeros(2, 128, 64, device="meta"),)
    short, long = (
        activations(capture_step(model, args, {"checkpoint": "blocks", **given}, train=True), 1)
        for given in ({}, {"blocks": "on"})
    )
    assert short == long


def test_the_memory_of_auto_is_bounded_by_that_of_the_most_recomputation():
    arguments = {"train": True, "max_chips": 1, "targets": ["v5e"], "tokens_per_step": 64 * LENGTH, "num_compiled": 0}
    auto, most, off = (
        plan(on_meta(), TOKENS, options={"checkpoint": mode}, **arguments).winner for mode in ("auto", 0, "off")
    )
    assert auto.checkpoint == "auto"
    assert auto.memory_parts["activations"] == most.memory_parts["activations"] < off.memory_parts["activations"]
    assert auto.time_parts_ms["matmuls"] == pytest.approx(off.time_parts_ms["matmuls"])


def test_rows_are_those_of_the_shortest_argument_with_tokens():
    encoder, decoder = (torch.zeros(4, length, dtype=torch.int64) for length in (512, 16))
    assert samples_of((encoder,)).rows == 512
    assert samples_of((encoder, decoder, torch.zeros(4, dtype=torch.int64), torch.ones(4, 9))).rows == 16
    assert samples_of((torch.zeros(4, 9), encoder)).rows == 1


class Checkpointed(Model):
    """The user's own checkpoint around the MLP: a step computes the first of its matmuls twice.

    The result of the second one is a part of what the loss saves.
    """

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + checkpoint(lambda x: self.down(nn.functional.gelu(self.up(x))), x, use_reentrant=False)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def test_mfu_counts_no_recomputed_matmul():
    """Also if one checkpoint mode is asked for, so that no graph without recomputation is there."""
    with torch.device("meta"):
        model = Checkpointed()
    arguments = {"train": True, "max_chips": 1, "targets": ["v5e"], "tokens_per_step": 4 * LENGTH, "num_compiled": 0}
    row = plan(model, TOKENS, options={"checkpoint": "off"}, **arguments).winner
    once = 3 * 2 * LENGTH * (2 * 4 * WIDTH * WIDTH + WIDTH * VOCABULARY) * row.step_samples
    again = 2 * LENGTH * 4 * WIDTH * WIDTH * row.step_samples
    peak = CHIPS["v5e"].bf16_flops
    assert row.time_parts_ms["matmuls"] == pytest.approx((once + again) / peak * 1e3)
    assert row.mfu == pytest.approx(once / peak / row.step_ms * 1e3)


def ranked(planned: Plan) -> list[tuple[float, PlanRow]]:
    """The bounds in which nothing overlaps with sums, in the order of the rows; results are summed along "model"."""
    found = []
    for row in planned.rows:
        ms = row.time_parts_ms
        if not ms["result_sums"]:
            hidden = max(ms["matmuls"], ms["traffic"], ms["gathers"])
            found.append((hidden + ms["gradient_sums"] + ms["optimizer"], row))
    return found


def test_rows_are_bounds_and_the_first_is_the_best():
    rows = found().rows
    assert {row.kind for row in rows} == {"bound"}
    assert rows[0].why == "the best bound; nothing was compiled that fits"
    prices = [row.usd_per_million * ms / row.step_ms for ms, row in ranked(found())]
    assert all(a <= b * 1.01 for a, b in pairwise(prices))  # equal ones differ by rounding
    assert len({(row.target, row.topology, row.sharding) for row in rows}) == len(rows) <= 10
    assert all(row.memory_bytes <= row.budget_bytes and 0 < row.mfu <= 1 for row in rows)


def test_totals_follow_from_the_tokens():
    row = found().winner
    assert row.step_tokens == row.step_samples * LENGTH
    assert row.hours == pytest.approx(1e9 / row.step_tokens * row.step_ms / 3.6e6)
    assert row.usd == pytest.approx(row.usd_per_million * 1000)


@cache
def fastest() -> Plan:
    return plan(
        on_meta(), TOKENS, train=True, tokens_per_step=64 * LENGTH, max_chips=16, objective="time", num_compiled=0
    )


def test_time_as_the_objective_takes_more_chips_than_cost():
    times, cheapest = ([ms / row.step_tokens for ms, row in ranked(p)] for p in (fastest(), found()))
    assert all(a <= b * 1.01 for a, b in pairwise(times))
    assert times[0] < times[-1]
    assert times[0] <= min(cheapest) * (1 + 1e-9)
    assert fastest().winner.num_chips > found().winner.num_chips


def test_the_text_marks_bounds_and_says_how_to_run_the_winner():
    text = found().text()
    assert ">= " in text
    assert "<= " in text
    assert 'torch.compile(model, backend="kp_tpu"' in text
    compile(found().code, "code", "exec")


def test_the_lines_that_run_the_winner_name_its_passes():
    options = {"extra_passes": [kp_dynamo.FlashAttention(block=256)], "checkpoint": "blocks"}
    planned = plan(on_meta(), TOKENS, train=True, targets=["v5e"], max_chips=4, num_compiled=0, options=options)
    line = next(line for line in planned.code.splitlines() if line.startswith("compiled = "))
    written = eval(line.partition("options=")[2].removesuffix(")"), {"kp_dynamo": kp_dynamo})
    assert written == options


@pytest.mark.parametrize(("train", "given"), [(True, "next(iter(batches))"), (False, "batch")])
@pytest.mark.parametrize("num_args", [1, 2])
def test_the_lines_read_only_what_the_user_has(train, given, num_args):
    row = dataclasses.replace(found().winner, sharding="fsdp+tensor", mesh={"data": 2, "model": 2})
    lines = code_lines._lines_of(row, dataclasses.replace(found(), train=train, num_args=num_args))
    example = f"({given},)" if num_args == 1 else given
    assert f"'fsdp+tensor', example_args={example})" in lines
    assert f"compiled({'*' if num_args > 1 else ''}kp_dynamo.shard_batch(batch, mesh))" in lines


def test_the_lines_of_inference_run_it_as_it_was_compiled():
    """In eval mode and without gradients, with all arguments."""
    with torch.device("meta"):
        model, args = nn.Bilinear(8, 8, 8), (torch.zeros(4, 8), torch.zeros(4, 8))
    code = plan(model, args, targets=["v5e"], max_chips=1, num_compiled=0).code
    code = code.replace('"xla"', '"cpu"').replace('backend="kp_tpu"', 'backend="eager"')
    known = {"model": nn.Sequential(nn.Dropout(1.0)), "batch": (torch.ones(4, 8),)}
    exec(code, known)
    assert torch.equal(known["result"], torch.ones(4, 8))
    assert not known["result"].requires_grad


def tensor_facts(model: nn.Module) -> tuple[Facts | None, dict[str, str]]:
    """The facts of "tensor" on four chips, and what is left out."""
    request = plan_request(model, TOKENS, True, Goal(("v5e",), 4), {"checkpoint": "off"})
    source = FactSource(request, {"off": capture_step(model, TOKENS, {"checkpoint": "off"}, train=True)})
    layout = next(found for found in layouts(sold("v5e", 4)[-1], with_tensor=True) if found.sharding == "tensor")
    return source.facts(layout, "off"), source.left_out


def test_the_pairs_of_a_model_without_a_plan_are_searched():
    model = on_meta()
    facts, left_out = tensor_facts(model)
    assert left_out == {}
    assert facts is not None
    assert facts.weights.num_bytes < sum(p.numel() * p.element_size() for p in model.parameters())


def test_a_model_that_takes_no_batch_of_one_is_planned_without_its_pairs():
    class NeedsTwo(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            if tokens.shape[0] == 1:
                raise ValueError("a batch of one")
            return super().forward(tokens)

    with torch.device("meta"):
        facts, left_out = tensor_facts(NeedsTwo())
    assert facts is None
    (reason,) = left_out.values()
    assert "a batch of one" in reason


def test_a_slice_of_two_hosts_is_planned_but_not_runnable():
    fast = fastest()
    assert fast.winner.num_hosts > 1
    assert fast.one_host is not None
    assert fast.one_host.num_hosts == 1
    assert fast.one_host.step_ms > fast.winner.step_ms
    text = fast.text()
    assert f"planned, not runnable by this version ({fast.winner.num_hosts} hosts)" in text
    assert "The best way on one host:" in text
    assert f"kp_dynamo.shard(model, mesh, {fast.one_host.sharding!r}" in text


class WithPlan(Model):
    """Brings a plan for tensor parallelism, as models of transformers do."""

    _tp_plan = {"up": "colwise", "down": "rowwise"}  # noqa: RUF012  # a plain dict there too


def test_a_model_with_a_plan_is_searched_with_tensor_shardings():
    with torch.device("meta"):
        model = WithPlan()
    planned = plan(model, TOKENS, train=True, targets=["v5e"], max_chips=4, tokens_per_step=64 * LENGTH, num_compiled=0)
    rows = {row.sharding: row for row in planned.rows}
    assert set(rows) == {"", "data", "fsdp", "tensor", "fsdp+tensor"}
    assert planned.left_out == {}
    row = rows["tensor"]
    divided = 4 * (2 * 4 * WIDTH * WIDTH + 4 * WIDTH)  # both matrices and the bias of the column matmul
    whole = 4 * (2 * VOCABULARY * WIDTH + VOCABULARY + WIDTH)
    assert row.memory_parts["parameters"] == whole + divided // row.mesh["model"]
    assert row.time_parts_ms["result_sums"] > 0


def test_a_plan_survives_json():
    again = Plan.from_dict(json.loads(json.dumps(found().to_dict())))
    assert again == found()
    with pytest.raises(TPUConfigurationError, match="schema=None"):
        Plan.from_dict({})


def test_inference_has_no_gradients():
    forward = plan(on_meta(), TOKENS, max_chips=1, targets=["v5e"], num_compiled=0)
    [row] = forward.rows
    assert row.memory_parts["gradients"] == row.memory_parts["optimizer"] == 0
    assert row.step_samples == TOKENS[0].shape[0]
    assert {name for name, ms in row.time_parts_ms.items() if ms} <= {"matmuls", "traffic"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"targets": ["v5x"]}, "target='v5x' is unknown"),
        ({"tokens_per_step": 1.5 * LENGTH}, r"of 512 tokens is within a tenth of it\. Try: 512 or 1024"),
        ({"targets": "v5e"}, "targets='v5e' is invalid"),
        ({"targets": ["v7"], "max_chips": 2}, "target='v7': its smallest slice has 4 chips"),
        ({"targets": ["v5p"], "max_chips": 2}, "its smallest slice has 4 chips"),
        ({"max_chips": 0}, "max_chips=0 is invalid"),
        ({"objective": "speed"}, "objective='speed' is invalid"),
        ({"tokens_per_step": 100}, "one sample has 512 tokens"),
        ({"tokens_per_step": float("nan")}, "tokens_per_step=nan is invalid"),
        ({"deadline_hours": 1}, "deadline_hours needs tokens"),
        ({"options": {"target": "v5e"}}, "'target': 'v5e'.* is unsupported by plan"),
        ({"options": {"levle": "balanced"}}, "levle"),
        ({"num_compiled": -1}, "num_compiled=-1 is invalid"),
    ],
)
def test_bad_arguments_are_refused_before_the_capture(monkeypatch, arguments, message):
    monkeypatch.setattr(planning, "_captures", lambda request: pytest.fail("it captured the model"))
    with pytest.raises(TPUConfigurationError, match=message):
        plan(on_meta(), TOKENS, train=True, **arguments)


def test_a_function_is_refused():
    with pytest.raises(TPUModelPreparationError, match=r"Allowed: a torch\.nn\.Module"):
        plan(torch.relu, TOKENS)


def test_tokens_need_a_model_of_tokens():
    with pytest.raises(TPUConfigurationError, match="no integer tensor"):
        plan(nn.Linear(4, 4), (torch.zeros(2, 4),), tokens_per_step=100)
    with pytest.raises(TPUConfigurationError, match="no tensor with a batch dimension"):
        plan(nn.Linear(4, 4), (3,))


@pytest.mark.parametrize("missing", ["libtpu", "jax"])
def test_without_the_compiler_only_bounds_can_be_asked_for(monkeypatch, missing):
    monkeypatch.setattr(planning, "find_spec", lambda name: None if name == missing else find_spec(name))
    monkeypatch.setattr(planning, "_captures", lambda request: pytest.fail("it captured the model"))
    with pytest.raises(TPUNotAvailableError, match=rf"\({missing} missing\).*kp_dynamo\[tpu\].*num_compiled=0"):
        plan(on_meta(), TOKENS)


def test_the_command_says_how_to_do_without_the_compiler(monkeypatch, tmp_path, capsys):
    (tmp_path / "spec.py").write_text("import torch\nmake = lambda: (torch.nn.Linear(8, 8), (torch.zeros(8, 8),))\n")
    monkeypatch.setattr(planning, "find_spec", lambda name: None)
    assert main(["plan", f"{tmp_path}/spec.py:make"]) == 1
    assert "--compile 0" in capsys.readouterr().err


def test_a_model_that_fits_nowhere_says_why_and_what_fits():
    """With gradients and two states, 554 million parameters in float32 are 8.9 GB: too much for 4 chips of 2 GB."""
    options = {"memory_budget_gb": 2.0}
    with pytest.raises(
        TPUOutOfMemoryError, match=r"fits nowhere on up to 1 chips of v5e.*optimizer state.*nearest"
    ) as e:
        plan(on_meta(8192), TOKENS, train=True, targets=["v5e"], max_chips=1, options=options,
             tokens_per_step=64 * LENGTH, num_compiled=0)  # fmt: skip
    assert "8 v5e" in str(e.value)


def test_a_model_that_fits_no_slice_that_is_sold():
    options = {"memory_budget_gb": 0.001}
    message = r"gradients 0\.\d+\. Allowed: 0\.00 GB.*none up to 1024 chips of .*, with 2 samples a step"
    with pytest.raises(TPUOutOfMemoryError, match=message):
        plan(on_meta(), TOKENS, train=True, targets=["v5e"], max_chips=4, options=options, tokens_per_step=2 * LENGTH,
             num_compiled=0)  # fmt: skip


def test_a_deadline_that_nothing_can_meet():
    with pytest.raises(TPUConfigurationError, match=r"deadline_hours=1e-06 is invalid.*takes at least"):
        plan(on_meta(), TOKENS, train=True, tokens=1e15, deadline_hours=1e-6, max_chips=4, targets=["v5e"],
             num_compiled=0)  # fmt: skip


def test_the_command_line(tmp_path, capsys):
    (tmp_path / "spec.py").write_text(
        "import torch\ndef make():\n"
        "    return torch.nn.Linear(512, 512), (torch.zeros(8, 512),)\n"
    )  # fmt: skip
    command = ["plan", f"{tmp_path}/spec.py:make", "--train", "--targets", "v5e", "--max-chips", "4", "--compile", "0"]
    assert main([*command, "--json", f"{tmp_path}/plan.json", "--html", f"{tmp_path}/plan.html"]) == 0
    out = capsys.readouterr().out
    assert "plan for training, lowest cost: up to 4 chips of v5e" in out
    assert "USD/M samples" in out
    read = Plan.from_dict(json.loads((tmp_path / "plan.json").read_text()))
    assert read.text() in out
    date = datetime.date.today().isoformat()
    assert (tmp_path / "plan.html").read_text() == read.to_html(date)
    assert f"Linear &middot; input: float32[8, 512] &middot; {date}</p>" in read.to_html(date)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--html", "nowhere/a.html"], "its folder does not exist"),
        (["--json", "nowhere/a.json"], "its folder does not exist"),
    ],
)
def test_the_command_refuses_before_it_loads_the_model(capsys, arguments, message):
    assert main(["plan", "no_such_file.py:make", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_plan_is_a_public_name():
    assert kp_dynamo.plan is plan
    assert kp_dynamo.Plan is Plan
