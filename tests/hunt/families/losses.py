"""Losses in every reduction, on logits as they are, flat, shifted or transposed."""

from __future__ import annotations

from tests.hunt.draft import Draft
from tests.hunt.families.wanted import floats

_REDUCTIONS = ("", ", reduction='sum'", ", reduction='none'", ", reduction='mean'")


def _targets(draft: Draft, logits: str, classes: int) -> str:
    dims = draft.dims(logits)[:-1]
    return draft.argument(
        dims,
        f"below {classes} {draft.choose(0, 0, -2)}" if classes > 2 else f"below {classes}",
        "int64",
        name=draft.fresh("target"),
    )


def head(draft: Draft) -> None:
    """The head of a language model, its loss, and maybe its logits as a result."""
    hidden = draft.pick(lambda v: floats(2, 3)(v) and v.shape[-1] in (3, 4, 8, 16))
    if hidden is None:
        return
    bias = draft.choose("", ", bias=False")
    layer = draft.attribute(f"nn.Linear({draft.value(hidden).shape[-1]}, {draft.choose(5, 8, 20)}{bias})", "head")
    logits = draft.let(
        draft.choose("{0}({1})", "{0}({1}).float()", "2 * torch.tanh({0}({1}) / 2)", "{0}({1}) * 0.5").format(
            layer, hidden
        ),
        "logits",
    )
    if logits is not None and draft.chance(2):
        draft.returned.append(logits)
    cross_entropy(draft, logits)


def cross_entropy(draft: Draft, logits: str | None = None) -> None:
    """Logits [..., C] and targets [...]; targets below 0 are ignored or made whole."""
    logits = logits or draft.pick(lambda v: floats(2, 3)(v) and v.shape[-1] >= 3)
    if logits is None:
        return
    classes = draft.value(logits).shape[-1]
    if any(call[logits].shape[-1] != classes for call in draft.calls):
        return
    target = _targets(draft, logits, classes)
    has_time = draft.value(logits).dim() == 3
    x, y = draft.choose(
        *(
            [
                (f"{logits}.reshape(-1, {classes})", f"{target}.reshape(-1)"),
                (f"{logits}.view(-1, {classes})", f"{target}.view(-1)"),
                (f"{logits}.flatten(0, 1)", f"{target}.flatten()"),
                (f"{logits}.transpose(1, 2)", target),
                (f"{logits}[:, :-1].reshape(-1, {classes})", f"{target}[:, 1:].reshape(-1)"),
                (f"{logits}[:, :-1].contiguous().view(-1, {classes})", f"{target}[:, 1:].contiguous().view(-1)"),
                (f"{logits}[:, -1]", f"{target}[:, -1]"),
                (f"{logits}.transpose(0, 1).reshape(-1, {classes})", f"{target}.t().reshape(-1)"),
            ]
            if has_time
            else [(logits, target), (f"{logits}[1:]", f"{target}[1:]")]
        )
    )  # fmt: skip
    more = draft.choose(*_REDUCTIONS)
    ignore = draft.choose("", ", ignore_index=-1", ", ignore_index=0", ", ignore_index=-100")
    y = f"{y}.clamp(min={-1 if ignore.endswith('=-1') else 0})"
    more += ignore + draft.choose("", "", ", label_smoothing=0.1")
    if draft.chance(4):
        weight = draft.buffer(f"torch.linspace(0.5, 1.5, {classes})", "weight")
        more += f", weight={weight}"
    form = draft.choose(
        "F.cross_entropy({0}, {1}{2})", "F.cross_entropy({0}, {1}{2})", "F.nll_loss(F.log_softmax({0}, 1), {1}{2})"
    )
    if "nll" in form:
        more = more.replace(", label_smoothing=0.1", "")
    name = draft.let(form.format(x, y, more), "loss")
    if name is not None and draft.value(name).dim() and draft.chance(2):
        draft.let(
            draft.choose(
                f"{name}.mean()",
                f"{name}.view({target}.shape).sum(-1)",
                f"({name} * torch.arange({name}.shape[0], device={name}.device)).sum()",
            ),
            "loss",
        )


_PAIRS = (
    "F.mse_loss({0}, {1}{2})", "F.l1_loss({0}, {1}{2})", "F.smooth_l1_loss({0}, {1}{2})", "F.huber_loss({0}, {1}{2})",
    "F.binary_cross_entropy({0}.sigmoid(), {1}.sigmoid(){2})", "F.binary_cross_entropy_with_logits({0}, {1}.sigmoid(){2})",
    "F.kl_div(F.log_softmax({0}, -1), F.softmax({1}, -1){2})", "F.kl_div(F.log_softmax({0}, -1), F.log_softmax({1}, -1), log_target=True{2})",
    "F.gaussian_nll_loss({0}, {1}, {1}.abs() + 0.5{2})", "F.poisson_nll_loss({0}, {1}.abs(){2})", "F.soft_margin_loss({0}, {1}.sign(){2})",
    "F.binary_cross_entropy_with_logits({0}, {1}.sigmoid(), pos_weight=torch.full(({0}.shape[-1],), 2.0, device={0}.device){2})",
    "F.cross_entropy({0}, F.softmax({1}, 1){2})", "F.hinge_embedding_loss({0}, {1}.sign(){2})", "({0} - {1}).square().mean()",
    "({0} - {1}).abs().sum((-1, -2))",
)  # fmt: skip


def pair(draft: Draft) -> None:
    x = draft.pick(floats(1, 2, 3))
    if x is None:
        return
    y = draft.like(x) or draft.argument(draft.dims(x))
    form = draft.choose(
        "{0}",
        "{0}",
        "{0}.flatten()",
        "{0}.flatten(0, 1)",
        "{0}[1:]",
        "{0}.transpose(0, -1)",
        "{0}.reshape(-1, {0}.shape[-1])",
    )
    reduction = (
        draft.choose(*_REDUCTIONS) if "kl_div" not in form else draft.choose(*_REDUCTIONS, ", reduction='batchmean'")
    )
    draft.let(draft.choose(*_PAIRS).format(form.format(x), form.format(y), reduction), "loss")


def contrastive(draft: Draft) -> None:
    """InfoNCE: each row's own place is its label."""
    x = draft.pick(floats(2, 3))
    if x is None:
        return
    y = draft.like(x) or x
    flat = "F.normalize({0}.reshape(-1, {0}.shape[-1]), dim=-1)"
    flat = draft.choose(flat, "F.normalize({0}.mean(1), dim=-1)" if draft.value(x).dim() == 3 else flat)
    scores = draft.let(f"{flat.format(x)} @ {flat.format(y)}.t()" + draft.choose("", " / 0.1", " * 5"), "scores")
    if scores is None:
        return
    labels = f"torch.arange({scores}.shape[0], device={scores}.device)"
    more = draft.choose(*_REDUCTIONS)
    draft.let(
        draft.choose(
            f"F.cross_entropy({scores}, {labels}{more})",
            f"(F.cross_entropy({scores}, {labels}) + F.cross_entropy({scores}.t(), {labels})) / 2",
            f"-F.log_softmax({scores}, -1).diagonal().mean()", f"-F.log_softmax({scores}, -1).diag()",
        ),
        "loss",
    )  # fmt: skip


def triplet(draft: Draft) -> None:
    x = draft.pick(floats(2))
    if x is not None:
        y, z = draft.like(x) or x, draft.like(x) or x
        more = draft.choose(*_REDUCTIONS)
        draft.let(
            draft.choose(f"F.triplet_margin_loss({x}, {y}, {z} + 1{more})", f"F.cosine_embedding_loss({x}, {y}, torch.ones({x}.shape[0], device={x}.device){more})",
                         f"F.margin_ranking_loss({x}, {y}, torch.ones_like({x}){more})", f"F.pairwise_distance({x}, {y} + 1)"),
            "loss",
        )  # fmt: skip


STEPS = (head, cross_entropy, cross_entropy, pair, pair, contrastive, triplet)
