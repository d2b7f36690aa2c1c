"""Optimizer steps written on arguments, as compiled steps do them; torch's own stand around whole programs."""

from __future__ import annotations

from tests.hunt.draft import Draft


def _tensors(draft: Draft, count: int) -> list[str]:
    dims = draft.choose((4, 8), (8,), (4, 6))
    kept = draft.choose(True, True, False)
    return [
        draft.argument(dims, "positive" if i == 3 else "normal", name=draft.fresh("p"), is_kept=kept)
        for i in range(count)
    ]


def momentum(draft: Draft) -> None:
    p, g, m = _tensors(draft, 3)
    nesterov = draft.choose(
        f"{p}.sub_({m}, alpha=0.1)",
        f"{p}.add_({m}, alpha=-0.1)",
        f"{p} -= 0.1 * {m}",
        f"{p}.sub_({g} + 0.9 * {m}, alpha=0.1)",
    )
    update = draft.choose(
        f"{m}.mul_(0.9).add_({g})", f"{m} *= 0.9\n{m} += {g}", f"{m}.lerp_({g}, 0.1)", f"{m}.copy_(0.9 * {m} + {g})"
    )
    _written(draft, f"{update}\n{nesterov}", p, m)


def adam(draft: Draft) -> None:
    p, g, m, v = _tensors(draft, 4)
    step = draft.buffer("torch.zeros(())", "step")
    count = draft.choose(f"{step} += 1", f"{step}.add_(1)")
    bias = draft.choose(f"(1 - 0.9 ** {step})", f"(1 - torch.pow(torch.tensor(0.9), {step}))", "1.0")
    decay = draft.choose("", f"{p}.mul_(1 - 0.01 * 0.1)\n")
    last = draft.choose(
        f"{p}.addcdiv_({m} / {bias}, {v}.sqrt() + 1e-8, value=-0.01)",
        f"{p} -= 0.01 * ({m} / {bias}) / ({v}.sqrt() + 1e-8)",
        f"{p}.sub_(0.01 * {m} / ({v}.sqrt().add_(1e-8)))",
    )
    _written(
        draft,
        f"{count}\n{decay}{m}.lerp_({g}, 0.1)\n" + draft.choose(f"{v}.mul_(0.99).addcmul_({g}, {g}, value=0.01)", f"{v}.lerp_({g} * {g}, 0.01)", f"{v}.copy_({v} * 0.99 + 0.01 * {g}.square())") + f"\n{last}",
        p, m, v,
    )  # fmt: skip


def foreach(draft: Draft) -> None:
    p, g, m, q = _tensors(draft, 4)
    _written(
        draft,
        draft.choose(
            f"torch._foreach_add_([{p}, {m}], [{g}, {q}], alpha=-0.1)", f"torch._foreach_mul_([{p}, {m}], 0.9)",
            f"torch._foreach_lerp_([{p}, {m}], [{g}, {q}], 0.1)", f"torch._foreach_copy_([{p}, {m}], [{m}, {p}])",
            f"torch._foreach_copy_([{p}], [{g}])\n{g}.zero_()", f"torch._foreach_addcmul_([{p}], [{g}], [{m}], value=0.5)",
            f"torch._foreach_sub_([{p}, {m}], torch._foreach_mul([{g}, {q}], 0.1))",
        ),
        p, m,
    )  # fmt: skip


def average(draft: Draft) -> None:
    """A target network that follows, or takes over."""
    p, q, r = _tensors(draft, 3)
    _written(
        draft,
        draft.choose(
            f"{q}.lerp_({p}, 0.01)",
            f"{q}.copy_({p})",
            f"{q}.mul_(0.99).add_({p}, alpha=0.01)\n{p}.add_({r})",
            f"{p}.add_({r})\n{q}.copy_({p})",
            f"{q}.copy_({p})\n{p}.add_({r})",
        ),
        p,
        q,
    )


def clipped(draft: Draft) -> None:
    g, h, p = _tensors(draft, 3)
    norm = draft.fresh("norm")
    total = draft.choose(
        f"torch.sqrt({g}.square().sum() + {h}.square().sum())",
        f"torch.linalg.vector_norm(torch.stack([{g}.norm(), {h}.norm()]))",
        f"torch.stack(torch._foreach_norm([{g}, {h}])).norm()",
    )
    draft.block(
        f"{norm} = {total}\n"
        + draft.choose(
            f"for t in ({g}, {h}):\n    t.mul_((1.0 / ({norm} + 1e-6)).clamp(max=1.0))",
            f"torch._foreach_mul_([{g}, {h}], (1.0 / ({norm} + 1e-6)).clamp(max=1.0))",
        )
        + f"\n{p}.sub_({g}, alpha=0.1)",
        norm,
    )


def _written(draft: Draft, text: str, *names: str) -> None:
    if draft.chance(2):
        text = "with torch.no_grad():\n" + "\n".join(f"    {line}" for line in text.splitlines())
    if draft.block(text):
        draft.let(draft.choose(f"{names[0]}.sum()", f"{names[0]} + {names[1]}", f"{names[0]}.norm()"))


STEPS = (momentum, adam, foreach, average, clipped)
