"""Norms, of torch and written out, at extreme statistics too."""

from __future__ import annotations

from tests.hunt.draft import Draft
from tests.hunt.families.wanted import floats

_RECIPES = ("normal", "large 100 1", "large 1000 1", "large 3000 1", "large 10 0.01", "normal 0.001", "large 1000 100")


def _operand(draft: Draft, *ndims: int) -> str | None:
    if draft.chance(2):
        return draft.pick(floats(*ndims))
    dims = draft.choose(*(d for d in (("B", 8), ("B", "L", 8), ("B", 4, "L"), ("B", 4, "L", 4)) if len(d) in ndims))
    return draft.argument(dims, draft.choose(*_RECIPES), requires_grad=draft.choose(True, False))


def over_features(draft: Draft) -> None:
    x = _operand(draft, 2, 3)
    if x is None:
        return
    width = draft.value(x).shape[-1]
    eps = draft.choose("", ", eps=1e-6", ", eps=1e-12")
    kind = draft.choose("layer", "functional", "rms", "written", "written rms", "two", "standard")
    if kind in ("layer", "rms"):
        layer = draft.attribute(
            f"nn.{'LayerNorm' if kind == 'layer' else 'RMSNorm'}({width}{eps}{draft.choose('', ', elementwise_affine=False')})",
            "norm",
        )
        draft.let(f"{layer}({x})")
    elif kind == "functional":
        draft.let(
            draft.choose(
                f"F.layer_norm({x}, ({width},){eps})",
                f"F.rms_norm({x}, ({width},))",
                f"F.layer_norm({x}, {x}.shape[-1:])",
            )
        )
    elif kind == "two":
        if draft.value(x).dim() == 3:
            draft.let(f"F.layer_norm({x}, {x}.shape[1:]{eps})")
    else:
        draft.let(
            draft.choose(
                f"({x} - {x}.mean(-1, keepdim=True)) / ({x}.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()",
                f"({x} - {x}.mean(-1, keepdim=True)) * torch.rsqrt({x}.var(-1, keepdim=True) + 1e-5)",
                f"{x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-6)", f"({x} - {x}.mean(0)) / ({x}.std(0) + 1e-5)",
                f"{x} / {x}.norm(dim=-1, keepdim=True).clamp(min=1e-6)", f"F.normalize({x}, dim=-1)", f"{x}.var(-1)", f"{x}.std(-1)",
                f"torch.var_mean({x}, -1)[0]", f"torch.std_mean({x}, dim=0)[0]", f"{x}.var((0, 1))",
            )
        )  # fmt: skip


def over_channels(draft: Draft) -> None:
    x = _operand(draft, 3, 4) if draft.chance(2) else _operand(draft, 2, 3)
    if x is None:
        return
    channels, ndim = draft.value(x).shape[1], draft.value(x).dim()
    if any(call[x].shape[1] != channels for call in draft.calls):
        return
    kind = draft.choose("batch", "group", "instance", "functional")
    if kind == "batch":
        more = draft.choose(
            "", ", affine=False", ", momentum=0.3", ", track_running_stats=False", ", momentum=None", ", eps=1e-3"
        )
        layer = draft.attribute(f"nn.BatchNorm{1 if ndim < 4 else 2}d({channels}{more})", "norm")
    elif kind == "group":
        groups = draft.choose(*(g for g in (1, 2, channels) if channels % g == 0))
        layer = draft.attribute(f"nn.GroupNorm({groups}, {channels}{draft.choose('', ', affine=False')})", "norm")
    elif kind == "instance":
        layer = draft.attribute(
            f"nn.InstanceNorm{1 if ndim < 4 else 2}d({channels}{draft.choose('', ', affine=True', ', track_running_stats=True')})",
            "norm",
        )
    else:
        draft.let(
            draft.choose(
                f"F.batch_norm({x}, None, None, training=True)", f"F.instance_norm({x})", f"F.group_norm({x}, 1)"
            )
        )
        return
    if layer is not None:
        draft.let(f"{layer}({x})")


STEPS = (over_features, over_features, over_features, over_channels, over_channels)
