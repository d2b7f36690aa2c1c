"""Programs as a hypothesis strategy, and by seed and number."""

from __future__ import annotations

from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider

from tests.hunt.configuration import configurations
from tests.hunt.draft import Draft
from tests.hunt.families import FAMILIES, START
from tests.hunt.program import Program

MAX_STATEMENTS = 10


class _OwnNumbers(HypothesisProvider):
    """Hypothesis's random numbers, and none of the literals that it finds in the modules that are loaded.

    With those (hypothesis 6.170 draws one number of twenty from them) a program would be another one in each process
    and after each change of the code.
    """

    def _maybe_draw_constant(self, *args: Any, **kwargs: Any) -> None:
        return None


BACKEND = "hunt"
AVAILABLE_PROVIDERS[BACKEND] = _OwnNumbers

_MODES = (
    *[("train",)] * 4, ("no_grad",), ("no_grad",), ("inference",), ("eval",), ("no_grad_train",),
)  # fmt: skip
_MIXED = (("train", "no_grad"), ("no_grad", "train"), ("train", "eval", "train"), ("inference", "no_grad"))


@st.composite
def programs(
    draw: st.DrawFn, *, is_sharded: bool = False, only: tuple[str, ...] = (), each: tuple[str, ...] = ()
) -> Program:
    """Programs of some families, composed statement by statement.

    Args:
        draw: Hypothesis's.
        is_sharded: Of the configuration.
        only: Families to draw from; default: all.
        each: Each program begins with a statement of one of these families.
    """
    configuration = draw(configurations(is_sharded=is_sharded))
    modes = _modes(draw)
    has_buckets = configuration.has_buckets
    draft = Draft(draw, _sizes(draw, len(modes), has_buckets), modes, has_buckets=has_buckets)
    START(draft)
    chosen = draw(st.lists(st.sampled_from(only or tuple(FAMILIES)), min_size=1, max_size=3, unique=True))
    if each:
        chosen.insert(0, _begin(draft, each))
    draft.families = chosen
    wanted = draw(st.sampled_from((2, 3, 3, 4, 4, 5, 6, MAX_STATEMENTS)))
    while len(draft.body) < wanted and draw(st.integers(0, 19)):
        family = draft.choose(*chosen, *chosen, "basics")
        draft.choose(*FAMILIES[family])(draft)
    results = _results(draft)
    return Program(
        source=draft.source(results),
        inputs=tuple(draft.inputs),
        modes=modes,
        seed=draw(st.integers(0, 999)),
        num_random=len(draft.random),
        optimizer=_optimizer(draft),
        families=tuple(chosen),
        configuration=configuration,
    )


def _begin(draft: Draft, each: tuple[str, ...]) -> str:
    """One of the families, from which the first statements are."""
    family, num_before = draft.choose(*each), len(draft.body)
    for _ in range(4):  # a step may find no value that fits
        if len(draft.body) == num_before:
            draft.choose(*FAMILIES[family])(draft)
    return family


def _modes(draw: st.DrawFn) -> tuple[str, ...]:
    if draw(st.integers(0, 7)) == 7:
        return draw(st.sampled_from(_MIXED))
    return draw(st.sampled_from(_MODES)) * draw(st.sampled_from((1, 2, 2, 3)))


def _sizes(draw: st.DrawFn, num_calls: int, has_buckets: bool) -> dict[str, tuple[int, ...]]:
    """Sizes of "B" and "L" at each call: they vary more often where there are buckets."""
    varies = draw(st.integers(0, 3)) >= (1 if has_buckets else 3)
    sizes = {}
    for symbol, low, high in (("B", 2, 4), ("L", 3, 11)):
        changes = varies and (symbol == "L" or draw(st.integers(0, 3)) == 3)
        one = draw(st.integers(low, high))
        others = [draw(st.integers(low, high + 4)) if changes else one for _ in range(num_calls - 1)]
        sizes[symbol] = (one, *others)
    return sizes


def _results(draft: Draft) -> list[str]:
    unused = [n for n in draft.unused() if n not in draft.random]
    results = unused[-4:]
    if not results or draft.chance(6):
        extra = draft.pick(lambda v: v.numel() <= 256)
        results += [extra] if extra is not None and extra not in (*results, *draft.random) else []
    results += [name for name in draft.returned if name not in results]
    if draft.has_buckets and not draft.chance(25):
        results = [f"{name}.clone()" if draft.is_view_of_input(name) else name for name in results]
    return [*results, *draft.random]


def _optimizer(draft: Draft) -> str | None:
    if "train" not in draft.modes or not draft.init or not draft.chance(4):
        return None
    return draft.choose(
        "torch.optim.SGD(parameters, lr=0.1)",
        "torch.optim.SGD(parameters, lr=0.1, momentum=0.9)",
        "torch.optim.AdamW(parameters, lr=0.01)",
        "torch.optim.Adam(parameters, lr=0.01, foreach=True)",
    )


def program_of(seed: int, index: int, each: tuple[str, ...] = ()) -> Program:
    """One program of a seed: the same in every process, whatever else was drawn."""
    return draw_program(programs(is_sharded=is_sharded(seed), each=each), number_of(seed, index))


def number_of(seed: int, index: int) -> int:
    """What hypothesis is seeded with."""
    return 10_000 * seed + index


def draw_program(strategy: st.SearchStrategy[Program], seed: int) -> Program:
    """What the strategy gives for a seed."""
    drawn: list[Program] = []

    @hypothesis.seed(seed)
    # The first example is the simplest one of all, whatever the seed; more than two would be changes of the second.
    @settings(
        max_examples=2, phases=[Phase.generate], database=None, deadline=None, derandomize=False, backend=BACKEND,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def collect(program: Program) -> None:
        drawn.append(program)

    collect()
    return drawn[-1]


def is_sharded(seed: int) -> bool:
    """Whether the programs of a seed run on four devices: one seed of twelve."""
    return seed % 12 == 11
