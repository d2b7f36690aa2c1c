"""Complex numbers between real ones: made of two tensors, computed with, taken apart."""

from __future__ import annotations

from tests.hunt.draft import Draft
from tests.hunt.families.wanted import floats

# Off the real axis, along which functions of complex numbers are cut.
_MADE = (
    "torch.complex({0}, {1} + 0.3)", "torch.view_as_complex(torch.stack([{0}, {1} + 0.3], -1))", "torch.fft.fft({0} + 1)", "torch.polar({0}.abs() + 0.2, {1})",
    "torch.fft.rfft({0}) + 0.3j", "{0} * (0.5 + 0.3j)", "{0} + 1j * ({1} + 0.3)", "torch.complex({0}, {1} + 0.3).to(torch.complex128)",
)  # fmt: skip
_COMPUTED = (
    "{0}.tanh()", "{0}.sigmoid()", "{0}.tanh().exp()", "{0}.sin()", "{0}.cos()", "({0} + 2j).sqrt()", "({0} * {0} + 5).log()", "{0}.acosh()", "{0}.asinh()", "{0}.sinh()", "{0}.cosh()",
    "1 / ({0}.abs() + {0} + 1)", "{0}.square()", "{0} * 2", "{0}.conj()", "{0} @ {0}.mH", "{0}.transpose(0, -1)", "{0}.sum(-1)", "{0}.mean()", "{0}.cumsum(-1)", "{0}.abs() * {0}",
    "torch.fft.ifft({0})", "torch.fft.fft({0} * 2)", "torch.fft.ifft({0}.conj())", "{0}.flip(0)", "torch.cat([{0}, {0}.conj()])", "{0}[0]", "torch.where({0}.real > 0, {0}, -{0})", "{0} ** 2",
    "{0}.sgn()", "{0} / {0}.abs().add(1)", "-{0}", "{0} - {0}.real", "{0}.exp()", "{0}.index_select(0, torch.tensor([0], device={0}.device))",
)  # fmt: skip
_TAKEN_APART = (
    "{0}.real",
    "{0}.imag",
    "{0}.abs()",
    "torch.view_as_real({0})",
    "{0}.angle().cos()",
)
_REAL = ("torch.fft.irfft({0})", "torch.fft.irfft({0} * 2, n=6)", "torch.fft.hfft({0})", *_TAKEN_APART)


def passage(draft: Draft) -> None:
    """From one or two real tensors to complex numbers and back."""
    x = draft.pick(floats(1, 2, 3))
    if x is None:
        return
    y = draft.like(x) or x
    z = draft.let(_one(draft, _MADE).format(x, y), "z")
    for _ in range(draft.choose(0, 1, 1, 2)):
        z = z and (draft.let(_one(draft, _COMPUTED).format(z), "z") or z)
    if z is not None and (real := draft.let(_one(draft, _REAL).format(z))):
        draft.let(f"{real}.float()")


def _one(draft: Draft, ways: tuple[str, ...]) -> str:
    """One of them; with buckets few transforms, which are refused by name along a padded dimension."""
    if draft.has_buckets and not draft.chance(8):
        ways = tuple(way for way in ways if "fft" not in way)
    return draft.choose(*ways)


STEPS = (passage,)
