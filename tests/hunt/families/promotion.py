"""Operands of different dtypes: tensors, 0-dim tensors, Python numbers."""

from __future__ import annotations

import torch

from tests.hunt.draft import Draft

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "bool")
_FLOATS = ("float32", "bfloat16", "float16", "float64")
_IN_SOURCE = {"float32": "FLOAT", "bfloat16": "HALF", "float16": "FLOAT16", "float64": "torch.float64"}


def _dtype(draft: Draft) -> str:
    return draft.choose(*_INTEGERS, *_FLOATS)


def _new(draft: Draft, ndims: tuple[int, ...] = (0, 1, 2)) -> str:
    dtype = _dtype(draft)
    recipe = (
        "bool 0.5"
        if dtype == "bool"
        else draft.choose("below 9 -9", "below 100 -100")
        if "int" in dtype and dtype != "uint8"
        else "below 9"
        if dtype == "uint8"
        else draft.choose("normal", "quarters")
    )
    shape = draft.dims(draft.inputs[0].name)
    dims = draft.choose(shape, shape, (), shape[-1:])
    _ = ndims
    return draft.argument(dims, recipe, dtype)


def _some(draft: Draft) -> str:
    return draft.pick(lambda v: v.dtype in _MIXED and v.numel() > 0) or _new(draft)


_MIXED = {getattr(torch, name) for name in (*_INTEGERS, *_FLOATS)}
_BINARY = (
    "{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / {1}.abs().add(1)", "torch.maximum({0}, {1})", "torch.minimum({0}, {1})",
    "torch.where({0} > {1}, {0}, {1})", "{0} > {1}", "{0} == {1}", "{0} <= {1}", "torch.add({0}, {1}, alpha=2)", "{0} & {1}",
    "{0} | {1}", "{0} ^ {1}", "torch.stack([{0}, {1}])", "torch.cat([{0}, {1}])", "{0} // {1}.abs().add(1)", "{0} % {1}.abs().add(1)",
    "torch.remainder({0}, {1}.abs() + 1)", "torch.fmod({0}, {1}.abs() + 1)", "torch.div({0}, {1}.abs() + 1, rounding_mode='floor')",
    "torch.div({0}, {1}.abs() + 1, rounding_mode='trunc')", "{0} << ({1}.abs() % 3)", "torch.floor_divide({0}, {1}.abs() + 1)",
    "torch.logical_and({0}, {1})", "torch.eq({0}, {1})", "torch.bitwise_and({0}, {1})", "torch.lerp({0}, {1}, 0.5)",
    "torch.addcmul({0}, {0}, {1})", "torch.clamp({0}, min={1})", "torch.mul({0}, {1})", "torch.ldexp({0}, {1})", "torch.gcd({0}, {1})",
    "torch.pow({0}.abs(), {1}.abs() % 3)", "torch.true_divide({0}, {1}.abs() + 1)", "torch.isin({0}, {1})", "torch.outer({0}.flatten(), {1}.flatten())",
)  # fmt: skip
_NUMBER = (
    "{0} + {1}", "{0} * {1}", "{1} - {0}", "{0} / {1}", "{0} // 3", "{0} % 3", "{0} ** 2", "{0} > {1}", "{0}.clamp(max={1})", "torch.add({0}, {1}, alpha=2)",
    "torch.where({0} > 0, {0}, {1})", "{0}.masked_fill({0} > 0, {1})", "torch.full_like({0}, {1})", "torch.maximum({0}, torch.tensor({1}))",
    "{0} * torch.tensor({1})", "{0} + torch.full((), {1})", "{0}.new_full((2,), {1})", "{0}.fmod(3)", "{0}.remainder(-3)",
    "torch.where({0} > 0, {1}, 2)", "torch.where({0} > 0, {1}, 2.5)", "{0} * torch.ones((), dtype=torch.int64)", "{0} + torch.ones((), dtype=torch.float64)",
    "{0} + torch.tensor(2, dtype=torch.int8)", "{0} + torch.arange({0}.shape[-1], device={0}.device)", "torch.result_type({0}, {1}) and {0}", "{0}.bitwise_not()",
    "{0} == {1}", "{0} != 0", "-{0}", "{0}.abs()", "{0}.sign()", "{0}.square()", "{0}.relu()", "torch.sqrt({0}.abs())", "{0}.exp().log()", "~{0}",
)  # fmt: skip
_REDUCE = (
    "{0}.sum()", "{0}.sum(-1)", "{0}.cumsum(0)", "{0}.cumsum(-1, dtype={1})", "{0}.sum(0, dtype={1})", "{0}.mean(dtype=FLOAT)", "{0}.prod(-1)",
    "{0}.prod(0, dtype={1})", "{0}.amax(-1)", "{0}.to({1})", "{0}.to({1}).sum(-1)", "{0}.type(torch.int8)", "{0}.cumprod(-1)", "{0}.any(-1)", "{0}.all()",
    "{0}.argmax(-1)", "{0}.max()", "{0}.min(-1).values", "torch.count_nonzero({0}, -1)", "{0}.to({1}) * 2", "{0}.to({1}) + {0}", "{0}.sort(-1).values",
    "torch.zeros_like({0}, dtype={1}) + {0}", "{0}.bool()", "{0}.long()", "{0}.to(torch.int16) * 200", "{0}.softmax(-1, dtype=FLOAT)", "{0}.cumsum(-1)",
    "{0}.cumprod(-1, dtype={1})", "torch.empty_like({0}).fill_(3)", "{0}.to(FLOAT).mean()",
    "{0}.to(FLOAT16).mean()", "{0}.to(HALF).sum(0)", "{0}.to(FLOAT16).std()", "{0}.to(HALF).norm()", "{0}.to(HALF).softmax(-1)",
    "torch.diff({0})", "{0}.new_zeros(3)", "{0}.flip(0)", "{0}.norm(dtype=FLOAT)", "{0}.trunc()", "{0}.floor()",
)  # fmt: skip
_NUMBERS = ("2", "0.5", "-3", "True", "1e-3", "7", "2.0", "100")


def binary(draft: Draft) -> None:
    x, y = _some(draft), _new(draft) if draft.chance(2) else _some(draft)
    draft.let(draft.choose(*_BINARY).format(x, y))


def number(draft: Draft) -> None:
    draft.let(draft.choose(*_NUMBER).format(_some(draft), draft.choose(*_NUMBERS)))


def reduce(draft: Draft) -> None:
    dtype = _dtype(draft)
    draft.let(draft.choose(*_REDUCE).format(_some(draft), _IN_SOURCE.get(dtype, f"torch.{dtype}")))


def in_place(draft: Draft) -> None:
    """The left operand keeps its dtype."""
    x, y = _some(draft), _some(draft)
    name = draft.fresh("h")
    text = draft.choose(
        "{0} += {1}",
        "{0} *= 2",
        "{0} -= {1}",
        "{0}.add_({1})",
        "{0}.copy_({1})",
        "{0}[0] = {1}",
        "{0}.mul_(torch.tensor(2))",
        "{0}.clamp_(0, 3)",
    )
    draft.block(f"{name} = {x}.detach().clone()\n" + text.format(name, f"{y}.detach()"), name)


STEPS = (binary, binary, binary, number, number, reduce, reduce, in_place)
