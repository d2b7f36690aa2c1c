"""What merges, splits, rolls, cuts and joins dimensions that vary: what padding to buckets must see through."""

from __future__ import annotations

from tests.hunt.draft import Draft
from tests.hunt.families.wanted import floats, whole

_MIX = (
    "{0}.reshape(-1, {0}.shape[-1])", "{0}.flatten(0, 1)", "{0}.reshape(-1)", "{0}.roll(1, 0)", "{0}.roll(1, 1)",
    "{0}.roll(-2, 1)", "{0}.reshape(-1, {0}.shape[-1]).roll(1, 0)", "{0}.flatten().roll(3)", "{0}.flip(0)", "{0}.flip(1)",
    "torch.cat([{0}, {0}], 1)", "torch.cat([{0}[:, :1], {0}], 1)", "torch.cat([{0}[:, 1:], {0}[:, :1]], 1)",
    "torch.cat([{0}, {0}.flip(1)], 1)", "torch.cat([{0}, {0} * 2], 0)", "F.pad({0}, (0, 0, 1, 0))", "F.pad({0}, (0, 0, 0, 1))",
    "F.pad({0}, (1, 1))", "F.pad({0}, (0, 0, 1, -1))", "{0}.cumsum(0)", "{0}.cumsum(1)", "{0}.flatten(0, 1).cumsum(0)",
    "{0}[:, ::2]", "{0}[:, 1::2]", "{0}[:, 1:] - {0}[:, :-1]", "{0}.diff(dim=1)", "{0}[:, -1]", "{0}[:, -2:]",
    "{0} / {0}.shape[1]", "{0} * ({0}.shape[1] > 6)", "{0} + {0}.shape[1]", "{0} * {0}.shape[0]", "{0}.sum(1) / {0}.shape[1]",
    "{0}.chunk(2, 1)[0]", "{0}.chunk(2, 1)[1]", "{0}.split(2, 1)[0]", "{0}.transpose(0, 1).reshape(-1, {0}.shape[-1])",
    "{0}.transpose(0, 1).flatten()", "{0}.mean(1)", "{0}.mean((0, 1))", "{0}.var(1)", "{0}.std(1)", "{0}.amax(1)",
    "{0}.sort(1).values", "{0}.sort(1, descending=True)[0]", "{0}.topk(2, dim=1).values", "{0}.median(1).values",
    "{0}.argmax(1)", "{0}.softmax(1)", "{0}.log_softmax(1)", "{0}.logsumexp(1)", "{0}.norm(dim=1)", "F.normalize({0}, dim=1)",
    "{0}[:, :{0}.shape[1] // 2]", "{0}[:, {0}.shape[1] // 2:]", "{0}[:, :int(.75 * {0}.shape[1])]", "{0}.unfold(1, 2, 1)",
    "{0}.repeat(1, 2, 1)", "{0}.repeat_interleave(2, 1)", "{0}.tile(1, 2, 1)", "{0}.expand(2, -1, -1, -1).flatten(0, 1)",
    "torch.stack([{0}, {0} * 2], 1).flatten(0, 1)", "torch.stack([{0}, -{0}], 2).flatten(1, 2)", "{0}.transpose(1, 2)",
    "{0}.view({0}.shape[0], -1)", "{0}.reshape({0}.shape[0] * {0}.shape[1], -1)", "{0}.var(1, correction=0)",
    "{0}.flatten(0, 1).view({0}.shape)", "{0}.flatten(0, 1).unflatten(0, ({0}.shape[0], {0}.shape[1]))", "{0}.prod(1)",
    "{0}.movedim(1, 0).flatten(0, 1)", "{0}.unbind(1)[0]", "{0}[:, 0]", "{0}.cummax(1).values", "{0}.cumprod(1)",
    "{0}.logcumsumexp(1)", "torch.trapezoid({0}, dim=1)", "{0}.nanmean(1)", "{0}.aminmax(dim=1)[0]", "{0}.count_nonzero(1)",
    "{0}.any(1)", "({0} > 0).all(1)", "{0}.nansum(1)", "{0}.var(1, correction=5)", "{0}.kthvalue(2, 1).values",
    "torch.triu({0}[..., 0])", "torch.tril({0}.transpose(1, 2))", "{0}.std((0, 1))", "{0}.mean(1, keepdim=True) - {0}",
    "{0}.tanh() ** {0}.shape[1]", "{0}.sigmoid() ** {0}.shape[0]", "({0} @ {0}.mT).flatten(1)[:, :: {0}.shape[1] + 1]",
    "{0}.flatten(1)[:, {0}.shape[1] - 1 :: {0}.shape[1]]", "{0}[:, :: max(1, {0}.shape[1] // 2)]", "{0}[:, -3::2]",
    "torch.cat([{0}, {0}], 1)[:, 1 :: {0}.shape[1]]", "{0}.roll({0}.shape[1] // 2, 1)", "({0} @ {0}.mT).triu({0}.shape[1] // 2)",
    "{0}[:, :1].repeat_interleave({0}.shape[1], 1)", "{0}.slice_scatter({0}[:, ::2] * 2, 1, 0, None, 2)",
    "({0} @ {0}.mT).diagonal({0}.shape[1] // 2, 1, 2)", "torch.diag_embed({0}[..., 0], {0}.shape[1] // 2)",
    "{0}.unfold(1, max(1, {0}.shape[1] // 2), 1)", "{0}.renorm(2, 0, {0}.shape[1] / 4)",
)  # fmt: skip
_PRODUCTS = (
    "{0} @ {0}.transpose(1, 2)", "{0}.transpose(1, 2) @ {0}", "{0}.flatten(0, 1) @ {0}.flatten(0, 1).t()",
    "{0}.flatten(0, 1).t() @ {0}.flatten(0, 1)", "torch.cdist({0}, {0})", "torch.einsum('bld,bmd->blm', {0}, {0})",
    "torch.einsum('bld,cld->bc', {0}, {0})", "torch.addmm({0}.flatten(0, 1), {0}.flatten(0, 1), torch.eye({0}.shape[-1], device={0}.device))",
    "torch.baddbmm({0}, {0} @ {0}.mT, {0})", "F.cosine_similarity({0}[:, None], {0}[:, :, None], dim=-1)",
    "({0}[:, :, None] - {0}[:, None]).square().sum(-1)", "torch.bmm({0}, {0}.mT).softmax(-1)", "{0}.flatten(0, 1) @ {0}.reshape(-1, {0}.shape[-1]).mT",
    "torch.outer({0}.flatten(), {0}[0, 0])", "torch.tensordot({0}, {0}, dims=([1], [1]))", "{0}.flatten(1) @ {0}.flatten(1).t()",
)  # fmt: skip
_INDEX = (
    "{0}.flatten(0, 1).index_add(0, torch.arange({0}.shape[0] * {0}.shape[1], device={0}.device), {0}.transpose(0, 1).flatten(0, 1))",
    "torch.zeros_like({0}).index_add(1, torch.arange({0}.shape[1], device={0}.device), {0})",
    "torch.zeros_like({0}).scatter(1, torch.arange({0}.shape[1], device={0}.device)[None, :, None].expand_as({0}), {0})",
    "{0}[:, torch.arange({0}.shape[1], device={0}.device)]", "{0}[:, torch.arange({0}.shape[1] - 1, -1, -1, device={0}.device)]",
    "{0}[torch.arange({0}.shape[0], device={0}.device), -1]", "{0}.gather(1, {0}.argsort(1))", "{0}.take_along_dim({0}.argsort(1), 1)",
    "{0}.index_select(1, torch.arange(0, {0}.shape[1], 2, device={0}.device))", "{0}.gather(1, torch.zeros_like({0}[:, :1], dtype=torch.int64))",
    "{0}.flatten(0, 1)[torch.arange({0}.shape[0] * {0}.shape[1], device={0}.device).flip(0)]",
    "torch.bucketize({0}, {0}[0, :, 0].detach().sort().values)", "torch.searchsorted({0}[0, :, 0].detach().sort().values, {0}.detach())",
    "torch.zeros({0}.shape[1], {0}.shape[-1], device={0}.device).index_copy(0, torch.arange({0}.shape[1], device={0}.device), {0}[0])",
    "torch.zeros(64, {0}.shape[-1], device={0}.device).index_add(0, torch.arange({0}.shape[0] * {0}.shape[1], device={0}.device) % 64, {0}.flatten(0, 1))",
    "F.one_hot({0}.argmax(1), {0}.shape[1])", "F.one_hot({0}.argmax(-1), {0}.shape[-1]).to({0}.dtype) @ {0}.mT",
)  # fmt: skip
_WINDOWS = (
    "F.avg_pool1d({0}.transpose(1, 2), 2)", "F.max_pool1d({0}.transpose(1, 2), 2)", "F.avg_pool1d({0}.mT, 3, 1, 1)",
    "F.max_pool1d({0}.mT, 3, stride=2, padding=1)", "F.pad({0}.mT, (1, 1), mode='reflect')", "F.pad({0}.mT, (1, 1), mode='replicate')",
    "F.pad({0}.mT, (2, 1), mode='circular')", "F.interpolate({0}.mT, scale_factor=2)", "F.interpolate({0}.mT, scale_factor=2, mode='linear')",
    "F.interpolate({0}[:, None], scale_factor=2, mode='bicubic')", "F.interpolate({0}.mT, size=4, mode='nearest')",
    "F.adaptive_avg_pool1d({0}.mT, 1)", "F.adaptive_avg_pool1d({0}.mT, 2)", "F.adaptive_max_pool1d({0}.mT, 1)",
    "F.conv1d({0}.mT, torch.ones(2, {0}.shape[-1], 3, device={0}.device), padding=1)", "F.unfold({0}[:, None], (2, 2))",
    "F.conv1d({0}.mT, torch.ones({0}.shape[-1], 1, 3, device={0}.device), groups={0}.shape[-1])", "F.lp_pool1d({0}.mT.abs() + 1, 2, 2)",
    "F.conv_transpose1d({0}.mT, torch.ones({0}.shape[-1], 2, 2, device={0}.device), stride=2)", "F.pixel_shuffle({0}[:, None].repeat(1, 4, 1, 1), 2)",
    "F.conv1d({0}.mT, torch.ones(2, {0}.shape[-1], 2, device={0}.device), padding={0}.shape[1] // 2)",
    "F.conv1d(torch.cat([{0}, {0}], 1).mT, torch.ones(2, {0}.shape[-1], 2, device={0}.device), stride=max(1, {0}.shape[1] // 2))",
    "F.conv1d(torch.cat([{0}, {0}], 1).mT, torch.ones(2, {0}.shape[-1], 2, device={0}.device), dilation=max(1, {0}.shape[1] - 1))",
    "F.conv_transpose1d({0}.mT, torch.ones({0}.shape[-1], 2, 2, device={0}.device), stride=max(1, {0}.shape[1] // 2))",
    "F.max_pool1d(torch.cat([{0}, {0}], 1).mT, 2, stride=max(1, {0}.shape[1] // 2))", "F.pad({0}.mT, ({0}.shape[1] // 2, 0), mode='replicate')",
    "F.interpolate({0}.mT, size={0}.shape[1] // 2 + 1, mode='linear')", "F.local_response_norm({0}.mT, 3)",
)  # fmt: skip


def mix(draft: Draft) -> None:
    _apply(draft, _MIX)


def product(draft: Draft) -> None:
    _apply(draft, _PRODUCTS)


def index(draft: Draft) -> None:
    _apply(draft, _INDEX)


def window(draft: Draft) -> None:
    _apply(draft, _WINDOWS)


def _apply(draft: Draft, texts: tuple[str, ...]) -> None:
    if (x := draft.pick(floats(3)) or draft.pick(floats(2))) is not None:
        draft.let(draft.choose(*texts).format(x))


def merged(draft: Draft) -> None:
    """Two values that lie otherwise and have one size."""
    x, y = draft.pick(floats(3)), draft.pick(floats(3))
    if x is None or y is None:
        return
    forms = (
        "{0}.flatten(0, 1)",
        "{0}.transpose(0, 1).flatten(0, 1)",
        "{0}.reshape(-1, {0}.shape[-1])",
        "{0}.flip(1).flatten(0, 1)",
    )
    first, second = draft.choose(*forms).format(x), draft.choose(*forms).format(y)
    text = draft.choose(
        "{0} + {1}",
        "{0} * {1}",
        "({0} * {1}).sum(-1)",
        "{0} @ {1}.t()",
        "torch.cat([{0}, {1}], 0)",
        "torch.cat([{0}, {1}], -1)",
    )
    draft.let(text.format(first, second))


def embedding(draft: Draft) -> None:
    dims = draft.choose(("B", "L"), ("B", "L"), ("L",), ("B",))
    ids = (
        draft.pick(whole(1, 2))
        if draft.chance(3)
        else draft.argument(dims, "below 10", "int64", name=draft.fresh("ids"))
    )
    table = draft.attribute("nn.Embedding(10, 4" + draft.choose("", ", padding_idx=0") + ")", "table")
    form = draft.choose("{0}", "{0}.flatten()", "{0}.reshape(-1)", "{0}.t()", "{0}[:, 1:]", "{0}.clamp(0, 9)")
    text = form.format(ids)
    draft.let(
        draft.choose(
            f"{table}({text})",
            f"F.embedding({text}, {table}.weight)",
            f"{table}.weight[{text}]",
            f"F.one_hot({text}, 10)",
        )
    )


def positions(draft: Draft) -> None:
    x = draft.pick(floats(3))
    if x is None:
        return
    width, on = draft.value(x).shape[-1], f"device={x}.device"
    table = draft.attribute(f"nn.Embedding(64, {width})", "places")
    draft.let(
        draft.choose(
            f"{x} + {table}(torch.arange({x}.shape[1], {on}))", f"{x} + {table}.weight[:{x}.shape[1]]",
            f"{x} + {table}(torch.arange({x}.shape[1], {on}).flip(0))", f"{x} * torch.arange({x}.shape[1], {on})[:, None]",
            f"{x} + {table}(torch.arange({x}.shape[0] * {x}.shape[1], {on}) % 64).view({x}.shape)",
            f"{x} * torch.linspace(0, 1, {x}.shape[1], {on})[:, None]", f"{x} + {table}.weight[-{x}.shape[1]:]",
            f"{x} / torch.arange(1, {x}.shape[1] + 1, {on})[:, None]",
        )
    )  # fmt: skip


def pooled(draft: Draft) -> None:
    """A mean over what a padding mask keeps."""
    x = draft.pick(floats(3))
    if x is None:
        return
    keep = draft.argument(draft.dims(x)[:2], draft.choose("padded 1", "padded 0"), "int64", name=draft.fresh("keep"))
    mask = draft.let(f"{keep}[..., None].to({x}.dtype)", "mask")
    if mask is not None:
        draft.let(
            draft.choose(
                f"({x} * {mask}).sum(1) / {mask}.sum(1)", f"({x} * {mask}).sum((0, 1)) / {mask}.sum()",
                f"{x}[torch.arange({x}.shape[0], device={x}.device), {keep}.sum(1) - 1]", f"{x}.masked_fill({mask} == 0, 0).mean(1)",
                f"{x}.masked_fill({mask} == 0, float('-inf')).amax(1)", f"({x} * {mask}).flatten(0, 1)",
            )
        )  # fmt: skip


def written(draft: Draft) -> None:
    """A new tensor of a size that varies, written in parts."""
    x = draft.pick(floats(3))
    if x is None:
        return
    y = draft.fresh("y")
    draft.block(
        f"{y} = torch.zeros_like({x})" + draft.choose("", ".clone()", " + 1") + "\n" + draft.choose(
            f"{y}[:, 1:] = {x}[:, :-1]", f"{y}[:] = {x}.flip(1)", f"{y}[:, ::2] = {x}[:, ::2]", f"{y}[..., 0] = {x}.sum(-1)",
            f"{y}[:, :1] = {x}[:, -1:]", f"{y}[{x} > 0] = 2.0", f"{y} += {x}", f"{y}[:, -1] = {x}[:, 0]", f"{y}[0] = {x}[-1]",
            f"{y}.flatten(0, 1)[:] = {x}.transpose(0, 1).reshape(-1, {x}.shape[-1])", f"{y}.view(-1, {x}.shape[-1])[1:] += 1",
        ),
        y,
    )  # fmt: skip


STEPS = (mix, mix, mix, product, index, window, merged, embedding, positions, pooled, written)
