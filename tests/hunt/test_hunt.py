"""Programs that are drawn: fixed ones here, random ones where tests may be slow; and the hunter itself."""

import json
import random
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.hunt import check as checking
from tests.hunt.check import check
from tests.hunt.configuration import Configuration
from tests.hunt.drawing import draw_program, number_of, program_of, programs
from tests.hunt.observe import How, observe
from tests.hunt.program import Input, Program
from tests.hunt.randomness import odd_shares
from tests.hunt.results import FILE, Results, plain_reason
from tests.hunt.rounding import Jitter
from tests.hunt.run import Hunt
from tests.hunt.script import script
from tests.hunt.shrink import shrunk, without_dead
from tests.hunt.worker import ROOT, Worker

FIXED = [tuple(pair) for pair in json.loads(FILE.with_name("fixed.json").read_text())]
CHUNK = 10
RIGHT = ("right", "refused")


@pytest.mark.quick("40")  # the others run beside random ones in `make test-all`
@pytest.mark.parametrize("first", range(0, len(FIXED), CHUNK))
def test_fixed_programs(first):
    outcomes = {pair: check(program_of(*pair)) for pair in FIXED[first : first + CHUNK]}
    assert {pair: outcome.text for pair, outcome in outcomes.items() if outcome.status not in RIGHT} == {}


def test_a_hundred_and_fifty_are_fixed():
    assert len(set(FIXED)) == 150


@pytest.mark.slow
def test_a_seed_gives_the_same_program_in_every_process():
    """Hypothesis's own numbers are those of the literals in all modules that are loaded, one time of twenty."""
    code = "from tests.hunt.drawing import program_of; print([program_of(1999, i) for i in range(10)])"
    few, many = (
        _printed(imports + code) for imports in ("", "import kp_dynamo.session, tests.end_to_end.test_bad_input; ")
    )
    assert few == many


def _printed(code):
    words = [sys.executable, "-c", code]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)  # ten minutes, and two for each failure to shrink it
def test_random_programs_for_ten_minutes():
    first = random.SystemRandom().randrange(10**6, 10**8)
    hunt = Hunt(iter(range(first, first + 10**6)), workers=2, deadline=time.monotonic() + 600)
    results = hunt.run()
    assert hunt.failures == []
    assert results.total("right") > 0


def a_program(source, *, seed=3, **changes):
    """A program that was drawn, with another source; its inputs are x1 [4, 8] and x2 [4, 8]."""
    program = draw_program(programs(only=("basics",)), seed)
    spec = replace(program.inputs[0], shapes=((4, 8),), values="normal", requires_grad=True, layout="contiguous")
    inputs = (replace(spec, name="x1", varying=()), replace(spec, name="x2", varying=(), requires_grad=False))
    plain = replace(program.configuration, options={"precision": "float32"}, device="cpu", dynamic=None)
    plain = replace(plain, is_marked=False, is_poisoned=False)
    return replace(
        program, source=source, inputs=inputs, modes=("train",), optimizer=None, num_random=0, configuration=plain,
        **changes,
    )  # fmt: skip


ADDS = """class Model(nn.Module):
    def forward(self, x1, x2):
        h1 = x1 * 2
        h2 = x1 + x2
        return h2
"""


def with_backend(monkeypatch, wrong):
    """Has programs compiled by `wrong`, a function of the model, in place of our backend."""
    monkeypatch.setattr(checking, "_compile", lambda program, model: wrong(model))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda x, y: x + y + 0.001, "off by"),
        (lambda x, y: (x + y).double(), "float64"),
        (lambda x, y: (x + y).t().contiguous().t(), "strides"),
        (lambda x, y: y + x.detach(), "requires_grad"),
        (lambda x, y: x + y.add_(1) - 1, "input x2"),
        (lambda x, y: torch.where(x == x[0, 0], float("nan"), x + y), "not finite"),
    ],
)
def test_wrong_results_are_detected(monkeypatch, wrong, text):
    with_backend(monkeypatch, lambda model: wrong)
    outcome = check(a_program(ADDS))
    assert outcome.status == "wrong"
    assert text in outcome.text


def test_a_result_that_must_share_memory_is_seen_where_it_does_not(monkeypatch):
    with_backend(monkeypatch, lambda model: lambda x, y: (y[1:].clone(),))
    outcome = check(a_program(ADDS.replace("return h2", "return (x2[1:],)")))
    assert "shares memory with nothing" in outcome.text
    with_backend(monkeypatch, lambda model: lambda x, y: (y[1:],))
    assert check(a_program(ADDS.replace("return h2", "return (x2[1:],)"))).status == "right"


@pytest.mark.parametrize(("rows", "text"), [(slice(1, None), ""), (slice(0, -1), "starts (0,) elements behind")])
def test_a_place_in_shared_memory_counts_and_a_place_in_a_storage_does_not(monkeypatch, rows, text):
    def backend(model):
        def forward(x, y):
            model.kept = torch.zeros(3, 8)  # at the start of a storage of its own
            return model.kept[rows]

        return forward

    with_backend(monkeypatch, backend)
    returned = "self.kept = torch.zeros(4, 8)[1:]\n        return self.kept[1:]"
    outcome = check(a_program(ADDS.replace("return h2", returned)))
    assert outcome.status == ("wrong" if text else "right")
    assert text in outcome.text


def test_rounding_is_no_failure(monkeypatch):
    """A cancellation that float32 cannot do better."""
    with_backend(monkeypatch, lambda model: lambda x, y: (x + 1e4) + y - 1e4)
    source = ADDS.replace("h2 = x1 + x2", "h2 = x1 + 1e4 - 1e4 + x2")
    assert check(a_program(source)).status == "right"


def test_a_program_is_the_same_in_every_process():
    drawn, worker = program_of(7, 3), Worker()
    answer = worker.ask({"seed": 7, "index": 3, "only_draw": True})
    worker.close()
    assert answer["program"] == drawn.to_json()
    assert Program.from_json(drawn.to_json()) == drawn
    assert number_of(7, 3) != number_of(3, 7)


@pytest.mark.parametrize("family", ["dropout", "losses"])
def test_a_hunt_may_begin_every_program_with_one_family(family):
    drawn = [program_of(7, index, (family,)) for index in range(8)]
    assert all(p.families[0] == family for p in drawn)
    if family == "dropout":
        assert all("drop" in p.source for p in drawn)
    assert len({p.families for p in drawn}) > 1  # beside others


def test_failures_shrink():
    source = ADDS.replace("return h2", "return h2, x1.t()")
    small = shrunk(a_program(source), lambda program: "x1 + x2" in program.source)
    assert small.source == ADDS.replace("        h1 = x1 * 2\n", "")
    assert not small.inputs[0].requires_grad


def test_assignments_that_nothing_reads_go():
    assert "h1" not in without_dead(ADDS)
    assert "h1" in without_dead(ADDS.replace("x1 * 2", "x1.mul_(2)"))


def test_a_script_runs_by_itself(capsys):
    exec(compile(script(a_program(ADDS), "nothing"), "script", "exec"), {})
    assert capsys.readouterr().out == ""


def test_every_other_run_stores_matmuls_in_bfloat16():
    """There a value may equal a number that it was near, which `isin` and `eq` tell."""
    x = torch.linspace(0, 1, 12, dtype=torch.float64).reshape(3, 4)
    is_stored = []
    for seed in (1, 2):
        with Jitter("matmul", seed):
            product = x @ x.mT
        is_stored.append(torch.equal(product, product.bfloat16().double()))
    assert is_stored == [False, True]


def test_running_statistics_move_as_all_else():
    """A mean that cancels to 0: rounding is all that is in it."""
    norm, x = torch.nn.BatchNorm2d(4), torch.randn(4, 4, 6, 4)
    with Jitter("nothing", 1):
        norm(torch.nn.functional.instance_norm(x))
    assert 0 < norm.running_mean.norm() < 1e-6


def test_what_cancels_inside_an_operator_moves():
    """Both are exact in torch: a norm of one element is 0, and GELU far below 0 rounds its `erf` and no more."""
    x = torch.tensor([[1.7, -0.3], [0.4, 1.1]])
    with Jitter("nothing", 1):
        norm, tail = torch.nn.functional.group_norm(x, 2), torch.nn.functional.gelu(torch.full((4,), -5.2))
    assert 0 < norm.abs().max() < 2**-22 * 1.7 * 316.3
    assert 1e-8 < (tail - torch.nn.functional.gelu(torch.tensor(-5.2).double())).abs().max() < 2**-23 * 2.6


def test_sums_that_cancel_in_the_backward_of_a_norm_move():
    """Of an element that stands out, all but `eps / variance` of the gradient cancels, in sums that round apart."""
    x = torch.tensor([[0, 0.49, 0, 0]], requires_grad=True)
    d_y = torch.tensor([[-0.43, 0, 0.26, 0.17]])
    result = torch.nn.functional.layer_norm(x, (4,))
    [exact] = torch.autograd.grad(torch.nn.functional.layer_norm(x.double(), (4,)), x, d_y.double())
    found = []
    for number in range(6):
        with Jitter("nothing", number):
            found += torch.autograd.grad(result, x, d_y, retain_graph=True)
    errors = [(one - exact)[0, 1].abs().item() for one in found]
    assert 1e-8 < max(errors) < 2**-22 * 0.43 * 4.7


ONE_LINEAR = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
    def forward(self, x1, x2):
        return self.linear(x1) + x2[..., :4]
"""


@pytest.mark.parametrize("affine", [False, True])
def test_a_norm_of_one_element_is_its_bias_in_every_other_run(affine):
    x, bias = 10 + 0.01 * torch.randn(4, 8), torch.arange(8.0) if affine else None
    norms = (lambda x: F.group_norm(x, 8, bias=bias), lambda x: F.layer_norm(x[..., None], (1,), bias=None)[..., 0])
    for norm, added in zip(norms, (bias, None), strict=True):
        with Jitter("nothing", 0):
            exact = norm(x)
        with Jitter("nothing", 1):
            rounded = norm(x)
        added = torch.zeros(8) if added is None else added
        torch.testing.assert_close(exact, added.expand(4, 8), rtol=1e-6, atol=0)  # the bias itself moves
        assert not torch.equal(rounded, exact)


def test_a_write_through_a_view_that_torch_xla_gets_wrong_is_excused():
    """Of elements in no window, also in inference mode, in which `aot_eager` cannot take the view."""
    source = "class Model(nn.Module):\n    def forward(self, x1):\n        return x1.unfold(-1, 4, 4).flatten(-2)\n"
    configuration = Configuration({"precision": "float32"}, "xla", None, False, False, False)
    for mode in ("no_grad", "inference"):
        inputs = (Input("x1", "float32", "normal", ((6,),)),)
        program = Program(source, inputs, (mode,), 0, 0, None, ("views",), configuration)
        assert check(program).status == "torch"


def test_a_step_is_judged_by_the_gradients_it_got():
    """Adam turns the sign of a gradient into a full step, though it may be nothing but rounding."""
    program = replace(a_program(ONE_LINEAR), optimizer="torch.optim.Adam(parameters, lr=0.1)")
    plain = observe(program, How())
    name = "call 0 gradient of linear.bias"
    turned = plain | {name: replace(plain[name], value=-plain[name].value)}
    after = observe(program, How(stepped=turned))
    assert torch.equal(after[name].value, plain[name].value)
    moved = after["step 0 parameter linear.bias"].value - plain["step 0 parameter linear.bias"].value
    torch.testing.assert_close(moved, 0.2 * plain[name].value.sign())


def test_shares_of_dropout():
    assert odd_shares([(480, 1000, 0.5), (30, 40, 0.75)]) is None
    assert "elements of 1000" in odd_shares([(900, 1000, 0.5)])
    assert odd_shares([(39, 40, 1.0)]) is not None


def test_reasons_count_as_one():
    texts = [
        "view_3 (at <program 12>:3 in forward): a size is s3*4 where 12 was expected",
        "view: a size is s7*8 where 1 was expected",
    ]
    assert len({plain_reason(text) for text in texts}) == 1


def test_the_documented_table_matches_the_results():
    """The table of docs/correctness.md, read from results.json."""
    text = (ROOT / "docs" / "correctness.md").read_text().partition("## A hunt")[2].partition("\n## ")[0]
    rows = {name: (all, last) for name, all, last in re.findall(r"^\| (\S.*?) \| (.*?) ?\| (.*?) ?\|$", text, re.M)}
    assert rows == Results.load().table()


def test_moves_go_both_ways_and_no_further_than_rounding():
    x = torch.full((1000,), 1.9)
    with Jitter("nothing", 0):
        moved = x + 0
    steps = (moved.double() - x.double()) / (x.double() * 2.0**-24)
    assert (steps < 0).float().mean() > 0.2
    assert (steps > 0).float().mean() > 0.2
    assert steps.abs().max() <= 3  # two operands and the result
