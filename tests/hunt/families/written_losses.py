"""Losses that are written by hand: the log-probability of the target taken by an index, masked means, z-losses."""

from __future__ import annotations

from tests.hunt.draft import Draft
from tests.hunt.families.wanted import floats

# {0} are logits [N, C], {1} targets [N], {2} the number of classes.
_LOG_PROBABILITIES = (
    "F.log_softmax({0}, -1).gather(1, {1}[:, None]).squeeze(1)", "F.log_softmax({0}, dim=-1)[torch.arange({1}.shape[0], device={1}.device), {1}]",
    "torch.log_softmax({0}, 1).take_along_dim({1}.unsqueeze(-1), -1)[:, 0]", "{0}.gather(-1, {1}.unsqueeze(-1)).squeeze(-1) - {0}.logsumexp(-1)",
    "F.softmax({0}, -1).gather(1, {1}[:, None]).log().flatten()", "(F.log_softmax({0}, -1) * F.one_hot({1}, {2})).sum(-1)",
    "{0}.log_softmax(-1).gather(-1, {1}.view(-1, 1))[..., 0]", "-F.cross_entropy({0}, {1}, reduction='none')",
    "({0} - {0}.amax(-1, keepdim=True)).log_softmax(-1).gather(1, {1}[:, None])[:, 0]", "F.log_softmax({0}.float() / 0.7, -1).gather(1, {1}[:, None]).squeeze(1)",
    "F.log_softmax({0}, -1, dtype=FLOAT).index_select(1, {1}).diagonal()",
)  # fmt: skip
# {0} are log-probabilities [N], {1} which of them count.
_REDUCED = (
    "-{0}.mean()", "-({0} * {1}).sum() / {1}.sum()", "-({0} * {1}).sum() / {1}.sum().clamp(min=1)", "-{0}.masked_fill(~{1}, 0.0).sum()", "-torch.where({1}, {0}, 0.0).mean()",
    "-{0}", "{0}.exp()", "-{0} * {1}", "-((1 - {0}.exp()) ** 2 * {0}).mean()", "-F.logsigmoid(0.1 * ({0} - {0}.detach())).mean()", "-({0} - {0}.detach()).exp().mean()",
    "-({0} * torch.arange({0}.shape[0], device={0}.device)).sum()", "(-{0}.mean()).exp()", "-{0}.cumsum(0)",
)  # fmt: skip


def written(draft: Draft) -> None:
    """Logits, the targets' log-probabilities, a mean of those that count, and maybe a z-loss."""
    found = draft.pick(lambda v: floats(2, 3)(v) and v.shape[-1] >= 3)
    if found is None:
        return
    logits, target = _flat(draft, found)
    if logits is None or target is None:
        return
    classes = draft.value(logits).shape[-1]
    ignored = draft.choose(0, 0, -100)
    safe = f"{target}.clamp(min=0)" if draft.chance(2) else f"torch.where({target} == {ignored}, 0, {target})"
    safe = draft.let(safe + draft.choose("", ".clamp(min=0)"), "target") or target
    chosen = draft.let(draft.choose(*_LOG_PROBABILITIES).format(logits, safe, classes), "chosen")
    if chosen is None:
        return
    counted = draft.choose(f"({target} != {ignored})", f"({target} > 0)", f"({target} != {ignored})")
    loss = draft.let(draft.choose(*_REDUCED).format(chosen, counted), "loss")
    if loss is not None and draft.chance(3):
        squares = f"torch.logsumexp({logits}, -1).square()"
        factor = draft.choose("0.1", "1e-2", "1.0")
        draft.let(
            draft.choose(
                f"{loss} + {factor} * {squares}.mean()",
                f"{loss} + {factor} * ({squares} * {counted}).sum() / {counted}.sum().clamp(min=1)",
                f"{loss} + {factor} * {logits}.logsumexp(dim=-1).pow(2).mean()",
            ),
            "loss",
        )


def _flat(draft: Draft, found: str) -> tuple[str | None, str | None]:
    """Logits [N, C], from a head or as they are, and targets [N]."""
    if draft.chance(2) and draft.value(found).shape[-1] in (3, 4, 8):
        width, bias = draft.value(found).shape[-1], draft.choose("", ", bias=False")
        layer = draft.attribute(f"nn.Linear({width}, {draft.choose(5, 8, 20)}{bias})", "head")
        found = draft.let(f"{layer}({found})", "logits") or found
    classes = draft.value(found).shape[-1]
    if any(call[found].shape[-1] != classes for call in draft.calls):
        return None, None
    target = draft.argument(
        draft.dims(found)[:-1], f"below {classes} {draft.choose(0, 0, -2)}", "int64", name=draft.fresh("target")
    )
    if draft.value(found).dim() == 2:
        return found, target
    x, y = draft.choose(
        (f"{found}.reshape(-1, {classes})", f"{target}.reshape(-1)"),
        (f"{found}.flatten(0, 1)", f"{target}.flatten()"),
        (f"{found}[:, :-1].reshape(-1, {classes})", f"{target}[:, 1:].reshape(-1)"),
        (f"{found}[:, :-1].contiguous().view(-1, {classes})", f"{target}[:, 1:].contiguous().view(-1)"),
        (f"{found}[:, -1]", f"{target}[:, -1]"),
        (f"{found}.transpose(0, 1).reshape(-1, {classes})", f"{target}.t().reshape(-1)"),
    )
    return draft.let(x, "logits"), draft.let(y, "target")


STEPS = (written,)
