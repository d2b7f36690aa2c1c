"""Attention as twenty people would write it, with every kind of mask, one or several together."""

from __future__ import annotations

from tests.hunt.draft import Draft
from tests.hunt.families.wanted import floats

_FILLS = (
    "torch.finfo({0}.dtype).min", "float('-inf')", "torch.finfo({0}.dtype).min", "float('-inf')", "-1e9", "-10000.0", "torch.finfo({0}.dtype).min / 2", "-1e4", "-1e30",
)  # fmt: skip


def attention(draft: Draft) -> None:
    """[B, L, D] in, [B, L, D] out."""
    x = draft.pick(lambda v: floats(3)(v) and v.shape[-1] in (4, 8, 12) and 2 <= v.shape[1] <= 24)
    if x is None:
        return
    heads = draft.choose(1, 2, 2, 4)
    parts = _split(draft, x, heads)
    if parts is None:
        return
    q, k, v = parts
    if heads > 1 and draft.chance(3):
        k, v = _shared(draft, k, v, heads)
    out = _fused(draft, q, k, v, x) if draft.chance(4) else _written(draft, q, k, v, x)
    if out is not None:
        merged = _merge(draft, out, x)
        if merged is not None and draft.chance(2):
            draft.let(f"{x} + {merged}")


def _split(draft: Draft, x: str, heads: int) -> tuple[str, str, str] | None:
    """Queries, keys and values [B, H, L, D], or [B, L, D] where there is one head."""
    width = draft.value(x).shape[-1]
    size, names = width // heads, tuple(draft.fresh(letter) for letter in "qkv")
    form = draft.choose("plain", "three", "fused", "same")
    if form == "plain":
        texts = [x, x, x]
    elif form == "same":
        texts = [x, draft.pick(floats(3)) or x, x]
        texts[2] = texts[1]
    elif form == "three":
        layers = [
            draft.attribute(f"nn.Linear({width}, {width}{draft.choose('', ', bias=False')})", "linear")
            for _ in range(3)
        ]
        texts = [f"{layer}({x})" for layer in layers]
    else:
        layer, all_three = draft.attribute(f"nn.Linear({width}, {3 * width})", "qkv"), draft.fresh("qkv")
        cut = draft.choose(
            f"{layer}({x}).chunk(3, dim=-1)",
            f"{layer}({x}).split({width}, dim=-1)",
            f"{layer}({x}).split([{width}] * 3, -1)",
        )
        if not draft.block(f"{all_three} = {cut}", all_three):
            return None
        texts = [f"{all_three}[{i}]" for i in range(3)]
    if heads > 1:
        b, length = draft.choose(f"{x}.shape[0]", f"{x}.size(0)"), draft.choose(f"{x}.shape[1]", "-1")
        into = draft.choose(
            f".view({b}, {length}, {heads}, {size}).transpose(1, 2)", f".reshape({b}, {length}, {heads}, -1).permute(0, 2, 1, 3)",
            f".unflatten(-1, ({heads}, {size})).transpose(1, 2)", f".view({b}, {length}, {heads}, {size}).permute(0, 2, 1, 3).contiguous()",
        )  # fmt: skip
        texts = [text + into for text in texts]
    text = "\n".join(f"{name} = {text}" for name, text in zip(names, texts, strict=True))
    return names if draft.block(text, *names) else None


def _shared(draft: Draft, k: str, v: str, heads: int) -> tuple[str, str]:
    """Keys and values of fewer heads, each read by several heads of queries."""
    count = draft.choose(*(n for n in (1, 2) if n < heads))
    times = heads // count
    form = draft.choose(
        f"{{0}}[:, :{count}].repeat_interleave({times}, 1)", f"{{0}}[:, :{count}].repeat_interleave({times}, dim=-3)",
        f"{{0}}[:, :{count}, None].expand(-1, -1, {times}, -1, -1).reshape({{0}}.shape)",
        f"{{0}}[:, -{count}:].unsqueeze(2).expand(-1, -1, {times}, -1, -1).flatten(1, 2)",
        f"{{0}}[:, :{count}].repeat(1, {times}, 1, 1)", "{0}[:, :1].expand_as({0})", "{0}[:, 1:2].expand(-1, {0}.shape[1], -1, -1)",
        f"torch.cat([{{0}}[:, :{count}]] * {times}, 1)",
    )  # fmt: skip
    return draft.let(form.format(k), "keys") or k, draft.let(form.format(v), "values") or v


def _merge(draft: Draft, out: str, x: str) -> str | None:
    if draft.value(out).dim() == 3:
        return out
    width = draft.value(x).shape[-1]
    return draft.let(
        draft.choose(
            f"{out}.transpose(1, 2).reshape({x}.shape)", f"{out}.transpose(1, 2).contiguous().view({x}.shape[0], -1, {width})",
            f"{out}.permute(0, 2, 1, 3).flatten(2)", f"{out}.transpose(1, 2).reshape({x}.size(0), {x}.size(1), {width})",
        )
    )  # fmt: skip


def _scale(draft: Draft, q: str) -> tuple[str, str]:
    """A factor on the queries and one on the scores."""
    size = draft.value(q).shape[-1]
    return draft.choose(
        ("", f" / math.sqrt({size})"), ("", f" * {size ** -0.5!r}"), (f" * {q}.size(-1) ** -0.5", ""),
        ("", f" * torch.tensor({size}.0, dtype=FLOAT).rsqrt()"), ("", " * torch.full((), 2.7, dtype=torch.int64)"),
        ("", " * torch.full((), 0.5, dtype=HALF)"), ("", ""), ("", f" / {q}.shape[-1] ** 0.5"),
        (f" / math.sqrt({size})", ""), ("", " * torch.tensor(True)"), (" * 0.5", " * 0.5"), ("", " * torch.tensor(0.3)"),
        ("", f" / torch.sqrt(torch.tensor({size}.0))"), ("", " * torch.full((), 0.1, dtype=torch.float64)"),
    )  # fmt: skip


def _written(draft: Draft, q: str, k: str, v: str, x: str) -> str | None:
    on_queries, on_scores = _scale(draft, q)
    product = draft.choose(
        "({0}{2}) @ {1}.transpose(-1, -2)", "torch.matmul({0}{2}, {1}.mT)", "torch.einsum('...id,...jd->...ij', {0}{2}, {1})",
        "torch.matmul({0}{2}, {1}.transpose(-2, -1))",
    ).format(q, k, on_queries)  # fmt: skip
    scores = draft.let(f"({product}){on_scores}", "scores")
    if scores is None:
        return None
    if draft.chance(8):
        cap = draft.choose(1.0, 2.0, 0.5, 50.0)
        form = draft.choose(
            "{1} * torch.tanh({0} / {1})", "({0} / {1}).tanh() * {1}", "torch.tanh({0})", "{0}.tanh() * {1}"
        )
        scores = draft.let(form.format(scores, cap), "scores") or scores
    for _ in range(draft.choose(1, 2, 0, 1, 2, 3)):
        scores = _masked(draft, scores, x) or scores
    if draft.chance(8):
        return _with_sinks(draft, scores, v)
    weights = draft.let(
        draft.choose(
            f"{scores}.softmax(-1)", f"F.softmax({scores}, dim=-1)", f"F.softmax({scores}, dim=-1, dtype=FLOAT).to({q}.dtype)",
            f"torch.softmax({scores}.to(FLOAT), -1)", f"F.softmax({scores} - {scores}.amax(-1, keepdim=True), -1)",
            f"F.log_softmax({scores}, -1).exp()", f"F.softmax({scores}, -1).nan_to_num(0.0)", f"({scores}).sigmoid()",
            f"torch.softmax({scores} - {scores}.max(dim=-1, keepdim=True).values.detach(), dim=-1)",
        ),
        "weights",
    )  # fmt: skip
    if weights is None:
        return None
    if draft.chance(6):
        p = draft.choose(0.1, 0.3)
        if draft.chance(2):
            return _with_mask_in_result(draft, weights, v, p)
        weights = draft.drawn(f"F.dropout({weights}, {p}, self.training)") or weights
    return draft.let(
        draft.choose(
            f"{weights} @ {v}", f"torch.matmul({weights}, {v})", f"torch.einsum('...ij,...jd->...id', {weights}, {v})"
        )
    )


def _with_sinks(draft: Draft, scores: str, v: str) -> str | None:
    """One more column of scores, a parameter of each head, that takes a share of the weights and has no value."""
    is_split = draft.value(scores).dim() == 4
    heads = draft.value(scores).shape[1] if is_split else 1
    sinks = draft.attribute(f"nn.Parameter(torch.linspace(-1, 1, {heads}))", "sinks")
    view = "1, -1, 1, 1" if is_split else "1, 1, 1"
    column = draft.let(
        draft.choose(
            f"{sinks}.view({view}).expand(*{scores}.shape[:-1], 1)",
            f"{sinks}.reshape({view}).expand({scores}.shape[0], {'-1, ' if is_split else ''}{scores}.shape[-2], -1)",
            f"{scores}[..., :1] * 0 + {sinks}.view({view})",
        ),
        "column",
    )
    both = column and draft.let(f"torch.cat([{scores}, {column}], dim=-1)", "both")
    if both is None:
        return None
    if draft.chance(2):
        both = draft.let(f"{both} - {both}.max(dim=-1, keepdim=True).values", "both") or both
    weights = draft.choose(f"F.softmax({both}, dim=-1)", f"{both}.softmax(-1)", f"F.softmax({both}, -1, dtype=FLOAT)")
    weights = draft.let(f"{weights}[..., :-1]", "weights")
    if weights is not None and draft.chance(6):
        weights = draft.drawn(f"F.dropout({weights}, 0.3, self.training)") or weights
    return weights and draft.let(draft.choose(f"{weights} @ {v}", f"torch.matmul({weights}.to({v}.dtype), {v})"))


def _with_mask_in_result(draft: Draft, weights: str, v: str, p: float) -> str | None:
    """Dropout of weights that are no result themselves: the values have unit vectors behind them, which show it."""
    units = f"torch.eye({v}.shape[-2], dtype={v}.dtype, device={v}.device)"
    shape = f"(*{v}.shape[:-1], {v}.shape[-2])"
    values = draft.let(f"torch.cat([{v}, {units}.expand({shape})], -1)", "values")
    both = values and draft.let(f"F.dropout({weights}, {p}, self.training) @ {values}", "both")
    if both is None:
        return None
    draft.drawn(f"{both}[..., {v}.shape[-1] :]")
    return draft.let(f"{both}[..., : {v}.shape[-1]]")


def _kept(draft: Draft, scores: str, x: str) -> str | None:
    """A boolean mask, true where attention is allowed, that broadcasts to [..., Q, K]."""
    q, k = draft.choose(f"{scores}.shape[-2]", f"{scores}.size(-2)"), f"{scores}.shape[-1]"
    on = f"device={x}.device"
    heads = draft.value(scores).dim() == 4
    kind = draft.choose(
        "causal", "left", "causal", "right", "left", "window", "lengths", "argument", "diagonal", "prefix"
    )
    if kind == "causal":
        text = draft.choose(
            f"torch.ones({q}, {k}, dtype=torch.bool, {on}).tril()", f"torch.tril(torch.ones({q}, {k}, {on})).bool()",
            f"torch.arange({q}, {on})[:, None] >= torch.arange({k}, {on})", f"~torch.triu(torch.ones({q}, {k}, dtype=torch.bool, {on}), 1)",
            f"torch.tril(torch.ones({q}, {k}, {on})) != 0", f"torch.ones({q}, {k}, dtype=torch.bool, {on}).tril(diagonal={k} - {q})",
            f"torch.tril(torch.ones({q}, {k}, dtype=torch.int64, {on})) == 1", f"torch.ones({q}, {k}, {on}).triu(1) == 0",
        )  # fmt: skip
    elif kind in ("right", "left"):
        dims = draft.dims(x)
        name = draft.argument(dims[:2], f"padded {int(kind == 'right')}", "int64", name=draft.fresh("keep"))
        text = draft.choose(f"{name}.bool()", f"({name} != 0)", f"({name} > 0)", f"{name}.to(torch.bool)")
        text += (
            draft.choose("[:, None, None, :]", ".unsqueeze(1).unsqueeze(2)", "[:, None, None]")
            if heads
            else draft.choose("[:, None, :]", ".unsqueeze(1)")
        )
    elif kind == "window":
        text = f"(torch.arange({q}, {on})[:, None] - torch.arange({k}, {on})).abs() < {draft.choose(2, 3, 4)}"
    elif kind == "lengths":
        name = draft.argument(draft.dims(x)[:1], "below 8 2", "int64", name=draft.fresh("lengths"))
        text = f"(torch.arange({k}, {on}) < {name}[:, None])" + ("[:, None, None, :]" if heads else "[:, None, :]")
    elif kind == "argument":
        dims = draft.dims(x)
        name = draft.argument(
            (dims[0], 1, dims[1], dims[1]) if heads else (dims[0], dims[1], dims[1]),
            "bool 0.8",
            "bool",
            name=draft.fresh("allowed"),
        )
        text = name
    elif kind == "diagonal":
        text = f"~torch.eye({q}, {k}, dtype=torch.bool, {on})"
    else:
        text = f"(torch.arange({q}, {on})[:, None] >= torch.arange({k}, {on})) | (torch.arange({k}, {on}) < 2)"
    return draft.let(text, "mask")


def _masked(draft: Draft, scores: str, x: str) -> str | None:
    draft.allows_extremes = True
    try:
        return _apply_mask(draft, scores, x)
    finally:
        draft.allows_extremes = False


def _apply_mask(draft: Draft, scores: str, x: str) -> str | None:
    if draft.chance(6):
        return _bias(draft, scores, x)
    kept = _kept(draft, scores, x)
    if kept is None:
        return None
    if draft.chance(4) and (other := _kept(draft, scores, x)) is not None:
        kept = (
            draft.let(
                draft.choose(f"{kept} & {other}", f"{kept} | {other}", f"torch.logical_and({kept}, {other})"), "mask"
            )
            or kept
        )
    fill = draft.choose(*_FILLS).format(scores)
    return draft.let(
        draft.choose(
            f"{scores}.masked_fill(~{kept}, {fill})",
            f"{scores}.masked_fill({kept}.logical_not(), {fill})",
            f"torch.where({kept}, {scores}, {fill})",
            f"torch.where({kept}, {scores}, torch.full((), {fill}, dtype={scores}.dtype, device={x}.device))",
            f"{scores} + torch.zeros({kept}.shape, dtype={scores}.dtype, device={x}.device).masked_fill(~{kept}, {fill})",
            f"{scores} + (1.0 - {kept}.to({scores}.dtype)) * {fill if 'inf' not in fill else -10000.0}",
            f"{scores} + (~{kept}) * {fill if 'inf' not in fill else -1e9}",
            f"{scores} + torch.where({kept}, 0.0, {fill})",
            f"{scores} + torch.full({kept}.shape, {fill}, dtype={scores}.dtype, device={x}.device).masked_fill({kept}, 0)",
            f"{scores} - (~{kept}).to({scores}.dtype) * 1e9",
            f"{scores} * {kept} + {fill if 'inf' not in fill else -1e9} * ~{kept}",
            f"torch.where({kept}, {scores}, torch.full((), -7.9, dtype=torch.int64, device={x}.device))",
        ),
        "scores",
    )


def _bias(draft: Draft, scores: str, x: str) -> str | None:
    on = f"device={x}.device"
    text = draft.choose(
        f"{scores} - 0.5 * (torch.arange({scores}.shape[-2], {on})[:, None] - torch.arange({scores}.shape[-1], {on})).abs()",
        f"{scores} + torch.arange({scores}.shape[-1], {on}) * 0.1", f"{scores}.tanh() * 5", f"{scores} / (1 + {scores}.shape[-1])",
        f"{scores} + {scores}.transpose(-1, -2)",
    )  # fmt: skip
    return draft.let(text, "scores")


def _fused(draft: Draft, q: str, k: str, v: str, x: str) -> str | None:
    mask = draft.choose("none", "causal", "bool", "additive")
    more = draft.choose("", ", scale=0.3", "", ", scale=1.0")
    if mask == "causal":
        more += ", is_causal=True"
    elif mask != "none":
        draft.allows_extremes = True
        scores = draft.let(f"{q} @ {k}.transpose(-1, -2)", "scores")
        kept = _kept(draft, scores, x) if scores is not None else None
        if kept is not None and mask == "additive":
            fill = draft.choose("torch.finfo(FLOAT).min", "float('-inf')", "-1e9")
            kept = draft.let(f"torch.where({kept}, 0.0, {fill})" + draft.choose("", f".to({q}.dtype)"), "mask")
        draft.allows_extremes = False
        if kept is not None:
            more += f", attn_mask={kept}"
    return draft.let(f"F.scaled_dot_product_attention({q}, {k}, {v}{more})")


def module(draft: Draft) -> None:
    """torch's own layers of attention."""
    x = draft.pick(lambda v: floats(3)(v) and v.shape[-1] in (4, 8, 12) and v.shape[1] > 1)
    if x is None:
        return
    width, heads = draft.value(x).shape[-1], draft.choose(1, 2)
    length, on = f"{x}.shape[1]", f"device={x}.device"
    mask = draft.choose("", f", attn_mask=torch.ones({length}, {length}, dtype=torch.bool, {on}).triu(1)",
                        f", attn_mask=torch.full(({length}, {length}), float('-inf'), {on}).triu(1)")  # fmt: skip
    if draft.chance(2):
        layer = draft.attribute(f"nn.MultiheadAttention({width}, {heads}, batch_first=True)", "attention")
        weights = draft.choose(", need_weights=False", "")
        padding = ""
        if draft.chance(3):
            name = draft.argument(draft.dims(x)[:2], "padded 1", "int64", name=draft.fresh("keep"))
            padding = f", key_padding_mask={name} == 0"
            if "full" in mask:
                mask = ""
        draft.let(f"{layer}({x}, {x}, {x}{mask}{padding}{weights})[0]")
    elif draft.chance(3):
        _encoder(draft, x, width, heads)
    else:
        first = draft.choose("False", "True")
        layer = draft.attribute(
            f"nn.TransformerEncoderLayer({width}, {heads}, 8, 0.0, batch_first=True, norm_first={first})", "layer"
        )
        draft.let(f"{layer}({x}{mask.replace('attn_mask', 'src_mask')})")


def _encoder(draft: Draft, x: str, width: int, heads: int) -> None:
    """Two of torch's layers, with a mask of what is padding."""
    more = draft.choose("", ", norm_first=True", ", activation='gelu'")
    layer = f"nn.TransformerEncoderLayer({width}, {heads}, 8, 0.0, batch_first=True{more})"
    norm = draft.choose("", f", norm=nn.LayerNorm({width})")
    encoder = draft.attribute(f"nn.TransformerEncoder({layer}, 2{norm})", "encoder")
    keep = draft.argument(draft.dims(x)[:2], "padded 1", "int64", name=draft.fresh("keep"))
    # Eager zeroes padded positions in inference, where a run with `Jitter`, which has no nested tensors, has numbers.
    only = draft.choose(f" * ({keep}[..., None] > 0)", "")
    draft.let(f"{encoder}({x}, src_key_padding_mask={keep} == 0){only}")


def rotary(draft: Draft) -> None:
    """Rotary positions on [B, L, D]."""
    x = draft.pick(lambda v: floats(3, 4)(v) and v.shape[-1] % 2 == 0)
    if x is None:
        return
    size, angle, half = draft.value(x).shape[-1], draft.fresh("angle"), draft.fresh("half")
    draft.block(
        f"{angle} = torch.arange({x}.shape[-2], device={x}.device)[:, None] * (0.1 ** torch.arange(0, {size}, 2, device={x}.device))\n"
        f"{angle} = torch.cat([{angle}, {angle}], -1)\n"
        f"{half} = torch.cat([-{x}[..., {size} // 2:], {x}[..., :{size} // 2]], -1)",
        angle, half,
    )  # fmt: skip
    draft.let(f"{x} * {angle}.cos() + {half} * {angle}.sin()")


STEPS = (attention, attention, attention, module, rotary)
