"""Loops over time or depth, and torch's own recurrent cells."""

from __future__ import annotations

from tests.hunt.draft import Draft
from tests.hunt.families.wanted import floats


def over_time(draft: Draft) -> None:
    """A state that is updated row by row; the number of rows is fixed, or unrolled for each length."""
    x = draft.pick(lambda v: floats(3)(v) and v.shape[1] <= 8)
    if x is None:
        return
    h, out, t = draft.fresh(), draft.fresh("steps"), draft.fresh("t")
    steps = draft.choose("3", f"{x}.shape[1]", f"min(4, {x}.shape[1])", "2")
    update = draft.choose(
        f"{h} = torch.tanh({h} + {x}[:, {t}])", f"{h} = 0.9 * {h} + 0.1 * {x}[:, {t}]", f"{h} = {h} * {x}[:, {t}].sigmoid() + {x}[:, {t}]",
        f"{h} = torch.maximum({h}, {x}[:, {t}])", f"{h} = {h} + {x}[:, -{t} - 1]", f"{h} = torch.where({x}[:, {t}] > 0, {x}[:, {t}], {h})",
    )  # fmt: skip
    end = draft.choose(
        f"{out} = torch.stack({out}, 1)", f"{out} = torch.cat({out}, -1)", f"{out} = {out}[-1]", f"{out} = sum({out})"
    )
    start = draft.choose(
        f"torch.zeros_like({x}[:, 0])",
        f"{x}[:, 0]",
        f"{x}.mean(1)",
        f"torch.zeros({x}.shape[0], {x}.shape[2], device={x}.device)",
    )
    draft.block(
        f"{h} = {start}\n{out} = []\nfor {t} in range({steps}):\n    {update}\n    {out}.append({h})\n{end}", h, out
    )


def in_place_over_time(draft: Draft) -> None:
    """Each row of a new tensor written from the one before."""
    x = draft.pick(lambda v: floats(2, 3)(v) and v.shape[0] <= 8)
    if x is None:
        return
    y, t = draft.fresh("y"), draft.fresh("t")
    body = draft.choose(
        f"{y}[{t}] = {y}[{t} - 1] * 0.5 + {x}[{t}]",
        f"{y}[{t}] += {y}[{t} - 1]",
        f"{y}[{t}].copy_({x}[{t} - 1])",
        f"{y}[{t}:] += {x}[{t}]",
    )
    draft.block(f"{y} = {x}.detach().clone()\nfor {t} in range(1, {x}.shape[0]):\n    {body}", y)


def over_depth(draft: Draft) -> None:
    """The same layer several times."""
    x = draft.pick(lambda v: floats(2, 3)(v) and v.shape[-1] in (4, 6, 8))
    if x is None:
        return
    width, h, i = draft.value(x).shape[-1], draft.fresh(), draft.fresh("i")
    layer = draft.attribute(
        draft.choose(
            f"nn.Linear({width}, {width})", f"nn.Sequential(nn.Linear({width}, 8), nn.Tanh(), nn.Linear(8, {width}))"
        ),
        "layer",
    )
    body = draft.choose(
        f"{h} = {h} + torch.tanh({layer}({h}))",
        f"{h} = F.layer_norm({h} + {layer}({h}), ({width},))",
        f"{h} = {layer}({h}).relu()",
    )
    draft.block(f"{h} = {x}\nfor {i} in range({draft.choose(2, 3, 4)}):\n    {body}", h)


def stacked(draft: Draft) -> None:
    """Equal layers of a ModuleList, which the backend may find as repeated."""
    x = draft.pick(lambda v: floats(2, 3)(v) and v.shape[-1] in (4, 8))
    if x is None:
        return
    width, h, layer = draft.value(x).shape[-1], draft.fresh(), draft.fresh("layer")
    one = draft.choose(
        f"nn.Sequential(nn.LayerNorm({width}), nn.Linear({width}, {width}), nn.GELU())", f"nn.Linear({width}, {width})"
    )
    layers = draft.attribute(f"nn.ModuleList([{one} for _ in range({draft.choose(2, 3)})])", "layers")
    draft.block(
        f"{h} = {x}\nfor {layer} in {layers}:\n    {h} = {draft.choose(f'{h} + {layer}({h})', f'{layer}({h})')}", h
    )


def cell(draft: Draft) -> None:
    x = draft.pick(lambda v: floats(2, 3)(v) and v.shape[-1] in (4, 6, 8))
    if x is None:
        return
    width, row = draft.value(x).shape[-1], x if draft.value(x).dim() == 2 else f"{x}[:, 0]"
    kind = draft.choose("GRUCell", "LSTMCell", "RNNCell")
    layer = draft.attribute(f"nn.{kind}({width}, {width})", "cell")
    if kind == "LSTMCell":
        draft.let(f"{layer}({row}, ({row}, {row}))[{draft.choose(0, 1)}]")
    elif (h := draft.let(f"{layer}({row}, {row})")) is not None and draft.chance(2):
        draft.let(f"{layer}({h}, {row})")


STEPS = (over_time, over_time, in_place_over_time, over_depth, stacked, cell)
