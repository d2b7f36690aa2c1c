"""What all programs are made of: layers, elementwise operators, matmuls, reductions, joins."""

from __future__ import annotations

from tests.hunt.draft import Draft
from tests.hunt.families.wanted import any_of, floats, is_float, masks

WIDTHS = (4, 6, 8)


def start(draft: Draft) -> None:
    """The first inputs: one to three of like shapes."""
    width = draft.choose(*WIDTHS)
    shape = draft.choose(("B", "L", width), ("B", "L", width), ("B", width), ("B", "L"), ("L", width), ("L",))
    for _ in range(draft.choose(1, 2, 3)):
        other = draft.choose(shape, shape, shape, shape[1:], (width,))
        draft.argument(
            other or shape,
            draft.choose("normal", "normal", "normal", "quarters", "positive"),
            requires_grad=draft.choose(True, True, False),
            layout=draft.choose("contiguous", "contiguous", "contiguous", "transposed", "offset"),
        )


_UNARY = (
    "torch.tanh({0})", "torch.relu({0})", "{0}.sigmoid()", "F.gelu({0})", "F.silu({0})", "-{0}", "{0}.abs()",
    "{0} * 2", "{0} + 1", "1 - {0}", "{0} / 3", "{0} ** 2", "torch.sin({0})", "{0}.clamp(-1, 1)", "{0}.clamp(min=0)",
    "torch.exp(-{0}.abs())", "torch.log1p({0}.abs())", "({0}.abs() + 0.1).rsqrt()", "F.gelu({0}, approximate='tanh')",
    "F.leaky_relu({0}, 0.1)", "F.softplus({0})", "F.elu({0})", "F.hardtanh({0})", "F.mish({0})", "torch.erf({0})",
    "{0}.square()", "torch.atan({0})", "F.hardswish({0})", "{0}.clone()", "{0}.contiguous()", "{0}.detach()",
    "torch.sqrt({0}.abs() + 0.5)", "torch.expm1({0}.clamp(max=2))", "2 ** {0}.clamp(max=3)", "torch.logit({0}.sigmoid())",
    "torch.zeros_like({0}) + {0}", "{0} * torch.ones_like({0})", "{0}.nan_to_num()", "torch.cos({0}) * 0.5",
)  # fmt: skip
_BINARY = (
    "{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / ({1}.abs() + 1)", "torch.maximum({0}, {1})",
    "torch.minimum({0}, {1})", "torch.where({0} > 0, {0}, {1})", "torch.lerp({0}, {1}, 0.3)",
    "torch.atan2({0}, {1}.abs() + 1)", "torch.addcmul({0}, {0}, {1}, value=0.5)", "torch.hypot({0}, {1})",
    "torch.add({0}, {1}, alpha=2)", "torch.logaddexp({0}, {1})", "{0} * {1}.sigmoid()", "torch.xlogy({0}.abs(), {1}.abs() + 1)",
    "torch.addcdiv({0}, {0}, {1}.abs() + 1, value=0.5)", "torch.rsub({0}, {1})", "torch.copysign({0}, {1})",
)  # fmt: skip


def unary(draft: Draft) -> None:
    if (x := draft.pick(is_float)) is not None:
        draft.let(draft.choose(*_UNARY).format(x))


def binary(draft: Draft) -> None:
    x, y = draft.pick(is_float), draft.pick(is_float)
    if x is not None and y is not None:
        draft.let(draft.choose(*_BINARY).format(x, y))


def linear(draft: Draft) -> None:
    x = draft.pick(lambda v: is_float(v) and v.dim() > 0 and v.shape[-1] in (*WIDTHS, 2, 3, 12, 16))
    if x is None:
        return
    width, out = draft.value(x).shape[-1], draft.choose(*WIDTHS)
    bias = draft.choose("", "", ", bias=False")
    layer = draft.attribute(f"nn.Linear({width}, {out}{bias})", "linear")
    text = draft.choose("{0}({1})", "F.gelu({0}({1}))", "F.linear({1}, {0}.weight)", "{1} @ {0}.weight.t()")
    if layer is not None:
        draft.let(text.format(layer, x))


def matmul(draft: Draft) -> None:
    x, y = draft.pick(floats(1, 2, 3)), draft.pick(floats(1, 2, 3))
    if x is None or y is None:
        return
    text = draft.choose("{0} @ {1}", "{0} @ {1}.transpose(-1, -2)", "{0}.transpose(-1, -2) @ {1}", "{0}.mT @ {1}")
    name = draft.let(text.format(x, y) + draft.choose("", " * 0.5"))
    if name is not None and draft.chance(3):
        draft.let(f"{name}.softmax(-1)")


def reduce(draft: Draft) -> None:
    x = draft.pick(floats(1, 2, 3))
    if x is None:
        return
    dim = draft.choose("", "-1", "0", "1", "(0, 1)", "-2")
    keep = draft.choose("", ", keepdim=True") if dim else ""
    method = draft.choose(
        "mean", "sum", "amax", "amin", "std", "var", "norm", "logsumexp", "prod", "median", "argmax", "any",
        "count_nonzero", "all",
    )  # fmt: skip
    if method in ("median", "any", "argmax", "count_nonzero", "all"):
        dim = dim or "0"
    if method == "norm":
        draft.let(f"{x}.norm({f'dim={dim}{keep}' if dim else ''})")
    elif method == "median":
        draft.let(f"{x}.median({dim})" + draft.choose(".values", "[0]"))
    elif method in ("any", "all"):
        draft.let(f"({x} > 0).{method}({dim}{keep})")
    else:
        keep = "" if method == "count_nonzero" else keep
        draft.let(f"{x}.{method}({dim}{keep})")


def softmax(draft: Draft) -> None:
    if (x := draft.pick(floats(1, 2, 3, 4))) is not None:
        dim = draft.choose("-1", "0", "1", "-2")
        draft.let(draft.choose("{0}.softmax({1})", "F.log_softmax({0}, dim={1})", "F.softmin({0}, {1})").format(x, dim))


def join(draft: Draft) -> None:
    x, y = draft.pick(floats(1, 2, 3)), draft.pick(floats(1, 2, 3))
    if x is not None and y is not None:
        dim = draft.choose("0", "1", "-1")
        text = draft.choose(
            "torch.cat([{0}, {1}], {2})", "torch.stack([{0}, {1}], {2})", "torch.cat(({1}, {0}), dim={2})"
        )
        draft.let(text.format(x, y, dim))


def reshape(draft: Draft) -> None:
    x = draft.pick(any_of(1, 2, 3, 4))
    if x is None:
        return
    text = draft.choose(
        "{0}.transpose(0, 1)", "{0}.transpose(-1, -2)", "{0}.flatten(0, 1)", "{0}.flatten()", "{0}.unsqueeze(1)",
        "{0}.reshape(-1)", "{0}.mT", "{0}[:, None]", "{0}[..., None]", "{0}.flatten(1)", "{0}.unsqueeze(0)",
        "{0}.reshape({0}.shape[0], -1)", "{0}.permute(2, 0, 1)", "{0}.movedim(0, -1)",
        "{0}.transpose(0, -1).contiguous()", "{0}.unflatten(-1, (2, -1))", "{0}.repeat(2, *[1] * ({0}.dim() - 1))",
        "{0}.expand(2, *{0}.shape)", "{0}.tile(2)", "{0}.repeat_interleave(2, dim=0)", "{0}.squeeze(1)",
    )  # fmt: skip
    draft.let(text.format(x))


def select(draft: Draft) -> None:
    mask, x, y = draft.pick(masks()), draft.pick(is_float), draft.pick(is_float)
    if x is None or y is None:
        return
    if mask is not None and draft.chance(2):
        draft.let(
            draft.choose("torch.where({0}, {1}, {2})", "{1}.masked_fill({0}, -1.5)", "{1} * {0}").format(mask, x, y)
        )
    else:
        draft.let(draft.choose("{0} > 0", "{0} >= {1}", "{0}.abs() < 0.7", "{0} != 0").format(x, y))


STEPS = (unary, unary, binary, binary, linear, linear, matmul, reduce, softmax, join, reshape, reshape, select)
