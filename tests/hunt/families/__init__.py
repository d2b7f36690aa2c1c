"""Families of statements: each a tuple of steps that propose text to a draft."""

from __future__ import annotations

from collections.abc import Callable

from tests.hunt.draft import Draft
from tests.hunt.families import (
    attention,
    autograd_functions,
    basics,
    complex_numbers,
    dropout,
    extremes,
    indexing,
    losses,
    matrices,
    norms,
    optimizers,
    padding,
    promotion,
    recurrent,
    signals,
    stacks,
    state,
    views,
    written_losses,
)

Step = Callable[[Draft], None]

START: Step = basics.start
FAMILIES: dict[str, tuple[Step, ...]] = {
    "basics": basics.STEPS,
    "state": state.STEPS,
    "views": views.STEPS,
    "attention": attention.STEPS,
    "padding": padding.STEPS,
    "losses": losses.STEPS,
    "norms": norms.STEPS,
    "promotion": promotion.STEPS,
    "dropout": dropout.STEPS,
    "autograd_functions": autograd_functions.STEPS,
    "recurrent": recurrent.STEPS,
    "optimizers": optimizers.STEPS,
    "indexing": indexing.STEPS,
    "extremes": extremes.STEPS,
    "matrices": matrices.STEPS,
    "complex_numbers": complex_numbers.STEPS,
    "stacks": stacks.STEPS,
    "written_losses": written_losses.STEPS,
    "signals": signals.STEPS,
}
