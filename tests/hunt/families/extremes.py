"""Infinities and NaN, where eager says what comes of them."""

from __future__ import annotations

from collections.abc import Callable

from tests.hunt.draft import MAX_SIZE, Draft
from tests.hunt.families.wanted import floats

# Detached: which of equal infinities gets a gradient is nowhere said.
_REDUCED = (
    "{0}.amax({1})", "{0}.amin({1})", "{0}.max({1}).values", "{0}.min({1})[0]", "{0}.logsumexp({1})", "{0}.softmax({1})", "{0}.log_softmax({1})",
    "torch.linalg.vector_norm({0}, dim={1})", "torch.linalg.vector_norm({0}, float('inf'), dim={1})", "torch.linalg.vector_norm({0}, float('-inf'), dim={1})",
    "torch.linalg.vector_norm({0}, 1, dim={1})", "torch.linalg.vector_norm({0}, 0, dim={1})", "{0}.sum({1})", "{0}.mean({1})", "{0}.prod({1})", "{0}.nansum({1})", "{0}.nanmean({1})",
    "{0}.cumsum({1})", "{0}.var({1})", "{0}.isnan().any({1})", "{0}.isinf().sum({1})", "({0} > 0).all({1})", "{0}.masked_fill({0}.isnan(), 0).amax({1})",
    "{0}.nan_to_num().mean({1})", "{0}.masked_fill({0} > 0, float('-inf')).amax({1})", "{0}.masked_fill({0}.isnan(), float('-inf')).softmax({1})", "{0}.sort({1}).values",
    "torch.full_like({0}, float('-inf')).amax({1})", "torch.full_like({0}, float('-inf')).logsumexp({1})", "{0}.masked_fill({0}.isnan(), float('inf')).logsumexp({1})",
    "{0}.nan_to_num(0, 1, -1).argmax({1})", "torch.aminmax({0}, dim={1})[0]", "{0}.detach().nanmedian({1}).values", "{0}.detach().topk(1, {1}).values", "torch.full_like({0}, float('-inf')).softmax({1})",
)  # fmt: skip
_ELEMENTWISE = (
    "torch.tanh({0})", "{0}.sigmoid()", "F.gelu({0})", "F.silu({0})", "F.relu({0})", "{0}.clamp(-1, 1)", "{0}.abs()", "{0}.sign()", "{0}.exp()", "{0}.log()", "{0}.sqrt()", "{0}.rsqrt()",
    "{0}.reciprocal()", "torch.maximum({0}, {1})", "torch.minimum({0}, {1})", "torch.fmax({0}, {1})", "torch.fmin({0}, {1})", "torch.logaddexp({0}, {1})", "{0} - {1}", "{0} * {1}", "{0} / {1}", "{0} * 0",
    "torch.where({0}.isnan(), {1}, {0})", "{0}.nan_to_num()", "{0}.isfinite()", "{0} == {1}", "{0} != {0}", "torch.atan2({0}, {1})", "torch.hypot({0}, {1})", "{0} ** 2", "{0} ** 0", "F.softplus({0})",
    "{0}.erf()", "{0}.expm1()", "{0}.log1p()", "{0}.floor()", "F.elu(torch.where({0}.isnan(), 0.5, {0}))", "F.leaky_relu({0})", "F.hardswish(torch.where({0}.isnan(), 0.5, {0}))", "torch.lerp({0}, {1}, 0.5)", "{0}.clamp(min={1})", "torch.xlogy({0}, {1})", "torch.logical_not({0})",
    "F.logsigmoid({0})", "torch.addcmul({0}, {0}, {1})", "torch.copysign({0}, {1})", "{0}.square()", "{0}.trunc()", "{0}.cos()", "F.mish({0})", "{0}.to(HALF)", "{0} > {1}", "{0}.signbit()", "{0}.isposinf()",
)  # fmt: skip
_MATMULS = (
    "torch.addmm({0}.new_full(({1}.shape[-1],), float('nan')), {1}, {1}.t() @ {1}, beta=0)", "torch.addmv({0}.new_full(({1}.shape[0],), float('inf')), {1}, {1}[0], beta=0)",
    "torch.baddbmm({0}.new_full((1, 1, 1), float('nan')), {1}[None], {1}.mT[None], beta=0)", "torch.where({1} > 0, {1}, float('-inf')).softmax(-1) @ {1}.mT",
)  # fmt: skip


def _operand(draft: Draft) -> str:
    return draft.argument(
        draft.choose(("B", 6), (3, 4), ("B", "L"), (5,)),
        draft.choose("extreme", "extreme", "normal"),
        requires_grad=draft.choose(False, False, True),
        name=draft.fresh("extreme"),
    )


def reduced(draft: Draft) -> None:
    _allowing(draft, lambda x: draft.choose(*_REDUCED).format(x, draft.choose("-1", "0")))


def elementwise(draft: Draft) -> None:
    def text(x: str) -> str:
        return draft.choose(*_ELEMENTWISE).format(x, draft.like(x) or f"{x}.flip(0)")

    _allowing(draft, text)


def matmul(draft: Draft) -> None:
    y = draft.pick(lambda v: floats(2)(v) and bool((v.abs() < MAX_SIZE).all()))  # no sums that overflow in some order
    if y is not None:
        _allowing(draft, lambda x: draft.choose(*_MATMULS).format(x, y))


def _allowing(draft: Draft, text: Callable[[str], str]) -> None:
    draft.allows_extremes = True
    name = draft.let(text(_operand(draft)))
    if name is not None and draft.chance(3):
        draft.let(
            draft.choose(
                "{0}.nan_to_num()", "torch.where({0} > 0, {0}, 0.5)", "{0} * 2", "{0}.isnan()", "{0}.clamp(-2, 2)"
            ).format(name)
        )
    draft.allows_extremes = False


STEPS = (reduced, reduced, elementwise, matmul)
