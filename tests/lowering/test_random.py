"""Random operators: compiled ones draw from torch's own CPU generator, wherever the tensors are."""

import pytest
import torch
import torch.nn.functional as F

from tests.spine import DEVICES, compiled

DRAWS = {
    "rand": torch.rand_like,
    "randn": torch.randn_like,
    "randint": lambda x: torch.randint(0, 1000, x.shape, device=x.device),
    "randperm": lambda x: torch.randperm(40, device=x.device),
    "bernoulli": lambda x: torch.bernoulli(x),
    "normal": lambda x: torch.normal(x, x),
    "multinomial": lambda x: torch.multinomial(x, 3),
    "uniform_": lambda x: torch.empty_like(x).uniform_(2, 3),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "dropout": lambda x: F.dropout(x, 0.3),
    "rrelu": lambda x: F.rrelu(-x, training=True),
}


def all_draws(x):
    return [draw(x) for draw in DRAWS.values()]


@pytest.fixture(scope="module", params=DEVICES)
def draw(request):
    """All kinds of draws in one graph, so in few programs; returns them by name, on the CPU."""
    run, half = compiled(all_draws), torch.full((4, 10), 0.5, device=request.param)

    def results():
        return {name: t.cpu() for name, t in zip(DRAWS, run(half), strict=True)}

    return results


def differing(one, other):
    return {name for name in DRAWS if not torch.equal(one[name], other[name])}


def test_manual_seed_repeats_and_draws_go_on(draw):
    torch.manual_seed(7)
    first, second = draw(), draw()
    torch.manual_seed(7)
    again = draw()
    assert differing(first, again) == set()
    assert differing(first, second) == set(DRAWS)
    torch.manual_seed(8)
    assert differing(first, draw()) == set(DRAWS)


def test_the_state_can_be_saved_and_restored(draw):
    draw()
    state = torch.get_rng_state()
    first = draw()
    torch.set_rng_state(state)
    assert differing(first, draw()) == set()


def test_fork_rng_leaves_the_state_as_it_was(draw):
    torch.manual_seed(7)
    with torch.random.fork_rng(devices=[]):
        inside = draw()
    assert differing(inside, draw()) == set()


def test_a_compiled_draw_and_an_eager_one_advance_one_generator(draw):
    torch.manual_seed(7)
    torch.rand(1)
    after_eager = draw()
    torch.manual_seed(7)
    assert differing(after_eager, draw()) == set(DRAWS)


def test_equal_draws_of_one_graph_are_independent():
    for device in DEVICES:
        a, b = compiled(lambda x: (torch.rand_like(x), torch.rand_like(x)))(torch.ones(50, device=device))
        assert not torch.equal(a, b)


def test_draws_have_the_distribution_they_should():
    for device in DEVICES:
        x = torch.ones(20_000, device=device)
        uniform, kept = (t.cpu() for t in compiled(lambda x: (torch.rand_like(x), F.dropout(x, 0.25)))(x))
        # Five standard errors: 1/sqrt(12 n) of the mean, sqrt(p (1-p) / n) of the share.
        assert abs(uniform.mean() - 0.5) < 5 / (12 * 20_000) ** 0.5
        assert abs((kept == 0).float().mean() - 0.25) < 5 * (0.25 * 0.75 / 20_000) ** 0.5
        assert set(kept.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}


def test_forward_and_backward_agree_on_the_mask():
    for device in DEVICES:
        x = torch.ones(500, device=device).requires_grad_()
        y = compiled(lambda x: F.dropout(x, 0.3))(x)
        y.sum().backward()
        assert torch.equal(y.detach(), x.grad)


def test_the_seed_of_eager_xla_code_is_left_alone():
    import torch_xla

    draws = []
    for compile_between in (False, True):
        torch_xla.manual_seed(3)
        if compile_between:
            compiled(lambda x: torch.rand_like(x) * 1.125)(torch.ones(5, device="xla"))
        draws.append(torch.rand(4, device="xla").cpu())
    assert torch.equal(*draws)


def test_a_generator_of_the_user_s_own_is_used():
    run = compiled(lambda x, g: x + torch.rand(3, generator=g))
    draws = [run(torch.zeros(3), torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*draws)
    assert torch.equal(draws[0], torch.rand(3, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uniform_numbers_between_equal_bounds(dtype):
    x = torch.zeros(4, dtype=dtype)
    torch.compile(lambda x: x.uniform_(2, 2), backend="kp_tpu")(x)
    assert x.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("p", [0.5, 1.0])
def test_dropout_of_infinities_and_nan_is_nan_where_it_drops(p, device):
    x = torch.tensor([torch.nan, torch.inf, -torch.inf] * 20, device=device, requires_grad=True)
    result = compiled(lambda x: F.dropout(x, p))(x)
    assert not (result == 0).any()
    assert result.isnan()[0]
    gradient = torch.autograd.grad(result.nan_to_num().sum(), x)[0]
    assert gradient.isfinite().all()


def test_exponential_numbers_are_not_cut_off():
    found = compiled(lambda x: torch.empty_like(x).exponential_())(torch.empty(1_000_000))
    assert 0 < found.min() < 1e-5
    assert found.max() > 11.6
    assert abs(found.mean() - 1) < 0.01
    scaled = compiled(lambda x: torch.empty_like(x).exponential_(4.0))(torch.empty(100_000, dtype=torch.float64))
    assert abs(scaled.mean() - 0.25) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_probabilities_are_not_rounded(dtype):
    """Of 1 in 1000, with 1000 expected ones and a deviation of 32."""
    x = torch.empty(1_000_000, dtype=dtype)
    draw = compiled(lambda x: (torch.full_like(x, 0.001).bernoulli(), x.clone().bernoulli_(0.999)))
    ones, zeros = draw(x)
    assert 800 < ones.float().sum() < 1200
    assert 800 < (1 - zeros.float()).sum() < 1200
    assert ones.dtype is dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_categories_are_all_drawn(dtype):
    drawn = compiled(lambda p: torch.multinomial(p, 30_000, replacement=True))(torch.full((1000,), 1e-3, dtype=dtype))
    assert len(drawn.unique()) == 1000


def test_a_category_without_probability_is_never_drawn():
    """torch_xla 2.9 draws the first one for a uniform number of 0, which is among the 2^20 numbers of these seeds."""
    draw = compiled(lambda x: torch.multinomial(x, 2**20, replacement=True))
    for seed in (1, 30):
        torch.manual_seed(seed)
        found = draw(torch.tensor([0.0, 0.0, 1.0, 2.0, 0.0]))
        assert found.dtype == torch.int64
        counts = torch.bincount(found, minlength=5)
        assert counts[[0, 1, 4]].sum() == 0
        assert abs(counts[3] / 2**20 - 2 / 3) < 0.002


def test_categories_of_rows_are_drawn_by_their_own_probabilities():
    chances = torch.tensor([[0.0, 1.0, 0.0], [3.0, 0.0, 1.0]], dtype=torch.float64)
    found = compiled(lambda x: torch.multinomial(x, 4000, replacement=True))(chances)
    assert found[0].eq(1).all()
    assert abs(found[1].eq(0).double().mean() - 0.75) < 0.03
    assert found[1].ne(1).all()
    assert compiled(lambda x: torch.multinomial(x[0], 1))(chances).tolist() == [1]
