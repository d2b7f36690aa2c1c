"""Dropout, and other random operators, whose results are the program's own: the mask is read off them."""

from __future__ import annotations

from tests.hunt.draft import Draft
from tests.hunt.families.wanted import floats


def dropout(draft: Draft) -> None:
    """Dropped and scaled, in training or always."""
    x = draft.pick(floats(1, 2, 3, 4))
    if x is None:
        return
    # Whether a zero was dropped does not show in the result, and decides its gradient.
    if any((call[x] * 4 == (call[x] * 4).round()).any() for call in draft.calls):
        x = f"{x} + 0.1"
    p = draft.choose("0.5", "0.1", "0.25", "0.9", "0.0")
    if draft.chance(2):
        text = f"{draft.attribute(f'nn.Dropout({p})', 'dropout')}({x})"
    else:
        text = f"F.dropout({x}, {p}, {draft.choose('self.training', 'training=self.training', 'True', 'False')})"
    name = draft.let(text) if p == "0.0" else draft.drawn(text)  # of nothing: its operand
    if name is not None and draft.chance(2):
        draft.let(
            draft.choose("{0} + {1}", "{0} * {1}", "F.gelu({0})", "{0}.mean(0)", "torch.cat([{0}, {1}])").format(
                name, x
            )
        )


def noise(draft: Draft) -> None:
    """Numbers of the same shape, used in what follows."""
    x = draft.pick(floats(1, 2, 3))
    if x is None:
        return
    text = draft.choose(
        "torch.rand_like({0})",
        "torch.randn_like({0})",
        "torch.bernoulli(torch.full_like({0}, 0.3))",
        "torch.rand({0}.shape, device={0}.device)",
    )
    name = draft.drawn(text.format(x))
    if name is not None:
        draft.let(
            draft.choose("{0} + 0.1 * {1}", "{0} * {1}", "{0} * ({1} > 0.2)", "({0} + {1}).softmax(-1)").format(x, name)
        )


STEPS = (dropout, dropout, noise)
