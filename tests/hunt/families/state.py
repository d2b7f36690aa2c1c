"""State that outlives a call: buffers, attributes, arguments that are written."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.hunt.draft import Draft
from tests.hunt.families.wanted import floats, is_float


def _zeros(draft: Draft, name: str) -> str | None:
    """An expression of zeros of the shape of `name`, if it is the same at all calls."""
    shapes = {tuple(call[name].shape) for call in draft.calls}
    return f"torch.zeros{tuple(shapes.pop())}".replace("zeros()", "zeros(())") if len(shapes) == 1 else None


def keep_last(draft: Draft) -> None:
    """A buffer keeps the last input, read before or after."""
    x = draft.pick(floats())
    if x is None or (zeros := _zeros(draft, x)) is None or (last := draft.buffer(zeros, "last")) is None:
        return
    written = draft.choose(f"{x}.detach()", f"{x}.detach()", f"{x}.detach() * 2", f"{x}.detach().clone()")
    read = draft.choose("{0} + {1}", "{0} - {1}", "{0} * 0.5 + {1}", "torch.cat([{0}, {1}], -1)")
    first = draft.chance(5)
    if first:
        draft.block(draft.choose(f"{last}.copy_({written})", f"{last} = {written}"))
    draft.let(read.format(x, last))
    if not first:
        draft.block(
            draft.choose(f"{last}.copy_({written})", f"{last}.copy_({written})", f"{last} = {written}",
                         f"{last}[...] = {written}", f"{last}.zero_()\n{last}.add_({written})")
        )  # fmt: skip


def counter(draft: Draft) -> None:
    dtype = draft.choose("torch.int64", "FLOAT", "torch.int32")
    count = draft.buffer(f"torch.zeros((), dtype={dtype})", "count")
    x = draft.pick(is_float)
    if count is None:
        return
    add = draft.choose(f"{count} += 1", f"{count}.add_(1)", f"{count} = {count} + 1")
    use = draft.choose("{0} * {1}", "{0} + {1}", "{0} / ({1} + 1)", "torch.where({1} > 1, {0}, -{0})")
    if draft.chance(2):
        draft.block(add)
        if x is not None:
            draft.let(use.format(x, count))
        return
    if x is not None:
        draft.let(use.format(x, count))
    draft.block(add)


def average(draft: Draft) -> None:
    """An exponential moving average of a mean over rows."""
    x = draft.pick(floats(2, 3))
    if x is None:
        return
    width = draft.value(x).shape[-1]
    ema = draft.buffer(draft.choose(f"torch.zeros({width})", f"torch.ones({width})"), "ema")
    mean = f"{x}.detach().reshape(-1, {width}).mean(0)"
    update = draft.choose(
        "{0}.mul_(0.9).add_({1}, alpha=0.1)", "{0}.lerp_({1}, 0.1)", "{0}.copy_(0.9 * {0} + 0.1 * {1})",
        "{0} = 0.9 * {0} + 0.1 * {1}", "{0} -= 0.1 * ({0} - {1})", "{0}.mul_(0.9)\n{0} += 0.1 * {1}",
    ).format(ema, mean)  # fmt: skip
    if ema is None:
        return
    read = draft.choose("{0} - {1}", "({0} - {1}) * 0.5", "{0} / (1 + {1}.abs())").format(x, ema)
    if draft.chance(2):
        draft.block(update)
        draft.let(read)
    elif draft.let(read) is not None:
        draft.block(update)


def cache(draft: Draft) -> None:
    """A cache of keys: written at a place, or rolled, and attended to."""
    x = draft.pick(floats(3))
    if x is None or len({call[x].shape[0] for call in draft.calls}) > 1:
        return
    batch, _, width = draft.value(x).shape
    longest = max(call[x].shape[1] for call in draft.calls)
    size = longest + draft.choose(0, 1, 4)
    cache = draft.buffer(f"torch.zeros({batch}, {size}, {width})", "cache")
    length = draft.choose(f"{x}.shape[1]", f"{x}.size(1)")
    update = draft.choose(
        f"{cache}[:, :{length}] = {x}.detach()",
        f"{cache}[:, :{length}].copy_({x}.detach())",
        f"{cache}.copy_(torch.cat([{cache}, {x}.detach()], 1)[:, -{size}:])",
        f"{cache}[:, -{length}:] = {x}.detach()",
        f"{cache} = torch.cat([{cache}, {x}.detach()], 1)[:, -{size}:]",
        f"{cache}.index_copy_(1, torch.arange({length}, device={x}.device), {x}.detach())",
        f"{cache}[:, torch.arange({length}, device={x}.device)] = {x}.detach()",
        f"{cache}.narrow(1, 0, {length}).add_({x}.detach())",
        f"{cache} = {cache}.roll(1, 1)\n{cache}[:, 0] = {x}[:, 0].detach()",
    )
    if not draft.block(update):
        return
    draft.let(
        draft.choose(
            f"({x} @ {cache}.transpose(1, 2)).softmax(-1) @ {cache}", f"{cache}[:, :{length}] + {x}", f"{cache}.mean(1)",
            f"{cache}.clone()", f"{x} * {cache}[:, -{length}:]", f"{cache}[:, 1:]", f"{cache}",
        )
    )  # fmt: skip


def ring(draft: Draft) -> None:
    """A ring of vectors, and the place that is written next."""
    x = draft.pick(floats(2, 3))
    if x is None:
        return
    width = draft.value(x).shape[-1]
    kept, place = (
        draft.buffer(f"torch.zeros(4, {width})", "ring"),
        draft.buffer("torch.zeros(1, dtype=torch.int64)", "place"),
    )
    row = f"{x}.detach().reshape(-1, {width})" + draft.choose("[:1]", ".mean(0, keepdim=True)", "[-1:]")
    text = draft.choose(
        "{0}.index_copy_(0, {1} % 4, {2})", "{0}[{1} % 4] = {2}", "{0}.scatter_(0, ({1} % 4).expand(1, {3}), {2})",
        "{0}.index_add_(0, {1} % 4, {2})",
    ).format(kept, place, row, width)  # fmt: skip
    if draft.block(text) and draft.block(
        draft.choose(f"{place} += 1", f"{place}.add_(3)", f"{place}.copy_(({place} + 1) % 4)")
    ):
        draft.let(f"{x} + {kept}" + draft.choose(".mean(0)", ".sum(0)", "[0]", "[-1]"))


def _plain_inputs(draft: Draft, count: int) -> list[str]:
    """`count` inputs of one shape that may be written, some of them new."""
    shape = draft.dims(draft.inputs[0].name)
    if draft.has_buckets and not draft.chance(25):
        shape = (4, 8)
    found = [
        i.name for i in draft.inputs
        if draft.dims(i.name) == shape and not i.requires_grad and i.dtype == "float32" and i.layout != "transposed"
    ]  # fmt: skip
    while len(found) < count:
        found.append(draft.argument(shape, layout=draft.choose("contiguous", "contiguous", "offset", "transposed")))
    order = draft.draw(st.permutations(found))
    return list(order[:count])


def exchange(draft: Draft) -> None:
    """Two or three arguments written with each other's values."""
    a, b, c = _plain_inputs(draft, 3)
    t, u = draft.fresh("t"), draft.fresh("u")
    draft.block(
        draft.choose(
            f"{t} = {a}.clone()\n{a}.copy_({b})\n{b}.copy_({t})",
            f"{t}, {u} = {a} + 0, {b} + 0\n{a}.copy_({u})\n{b}.copy_({t})",
            f"{t} = {a}.clone()\n{a}.copy_({b})\n{b}.copy_({c})\n{c}.copy_({t})",
            f"{t} = {a} * 2\n{a}.copy_({b})\n{b}.copy_({t})",
            f"{t} = {a}.clone()\n{a}.copy_({b})",
            f"{t} = {a} + {b}\n{b}.copy_({a})",
            f"{t} = {a} + {b} + {c}\n{b}.copy_({a})\n{c}.copy_({b})",
            f"{t} = {a}.clone()\n{a}[...] = {b}\n{b}[...] = {t}",
            f"{t} = {a} + {b}\n{a}.copy_({t})\n{b}.copy_({a})",
            f"{t} = {a}.clone()\n{a}.zero_()\n{a}.add_({b})\n{b}.copy_({t})",
            f"{t} = torch.stack([{a}, {b}])\n{a}.copy_({t}[1])\n{b}.copy_({t}[0])",
            f"{t} = {b}.detach()\n{a}.copy_({t})",
        ),
        t,
    )


def write(draft: Draft) -> None:
    """One argument written in place, or through a view."""
    (a,) = _plain_inputs(draft, 1)
    other = draft.like(a) or a
    more = draft.pick(is_float) or a
    draft.block(
        draft.choose(
            f"{a}.add_({other}.detach())", f"{a}.mul_(0.5)", f"{a} += 1", f"{a}.copy_({other}.detach())", f"{a}.zero_()",
            f"{a}[0] = 0", f"{a}[0].copy_({a}[-1])", f"{a}[..., 0] = 1.5", f"{a}[:, 1:] += 1", f"{a}.t().mul_(2)",
            f"{a}.transpose(0, 1).add_(1)", f"{a}[1:] = {a}[:-1].clone()", f"{a}.view(-1)[0] = 3",
            f"{a}.clamp_(min=0)", f"{a}.masked_fill_({a} > 0.5, 0)", f"{a}[{a} > 1] = 0", f"{a}.fill_(2)", f"{a}.tanh_()",
            f"{a}.sub_({other}.detach(), alpha=2)", f"{a}.lerp_({other}.detach(), 0.5)", f"{a}.narrow(0, 0, 1).mul_(3)",
            f"{a}.select(-1, 0).add_(1)", f"{a}.index_fill_(0, torch.tensor([0], device={a}.device), 7)",
            f"{a}.addcmul_({other}.detach(), {other}.detach())", f"{a}.copy_({more}.detach())", f"{a}.neg_()",
            f"{a}[:1].add_({a}[1:2])", f"{a}.diagonal().fill_(1)", f"{a}.flatten().add_(1)", f"{a}[...] = {more}.detach()",
            f"{a}.uniform_(0, 0)", f"{a}.index_add_(0, torch.tensor([0], device={a}.device), {a}[1:2].clone())",
            f"{a}.squeeze(0).add_(1)", f"{a}.unsqueeze(0)[0].mul_(2)", f"{a}.chunk(2)[0].add_(1)",
            f"for part in {a}.split(2):\n    part.mul_(2)", f"{a}.data.add_(1)", f"{a}.detach().mul_(3)",
        )
    )  # fmt: skip


def read_and_write(draft: Draft) -> None:
    """A result made of an argument, which is then overwritten."""
    a, b = _plain_inputs(draft, 2)
    x = draft.pick(is_float) or a
    if draft.let(draft.choose(f"{a} + {x}", f"{a} * {b}", f"{a} + {b} + {x}", f"{a}.mean() + {x}")) is not None:
        draft.block(
            draft.choose(f"{a}.copy_({b})", f"{a}.copy_({b})", f"{a}.copy_({b} + 1)", f"{a}.copy_({a} + {b})",
                         f"{a}.add_({b})", f"{a}.copy_({x}.detach())")
        )  # fmt: skip
        if draft.chance(2):
            draft.let(f"{a} - {x}")


def parameter(draft: Draft) -> None:
    """A parameter of its own, used and perhaps written."""
    x = draft.pick(floats(1, 2, 3))
    if x is None:
        return
    width = draft.value(x).shape[-1]
    weight = draft.attribute(f"nn.Parameter(torch.linspace(-1, 1, {width}))", "weight")
    if (
        weight is not None
        and draft.let(draft.choose(f"{x} * {weight}", f"{x} + {weight}")) is not None
        and draft.chance(4)
    ):
        draft.block(f"with torch.no_grad():\n    {weight}.mul_(0.99)")


def hidden(draft: Draft) -> None:
    """A plain attribute of the module that holds the last state."""
    x = draft.pick(floats())
    zeros = _zeros(draft, x) if x is not None else None
    if zeros is None or (state := draft.attribute(zeros, "hidden")) is None:
        return
    new = draft.let(f"torch.tanh({x} + {state})")
    if new is not None:
        draft.block(f"{state} = {new}.detach()")


def twice(draft: Draft) -> None:
    """One tensor as two arguments, or two that have rows in common, perhaps written to."""
    wanted = draft.choose("contiguous", "offset")
    fitting = [
        spec for spec in draft.inputs
        if spec.layout == wanted and not spec.requires_grad and not spec.is_kept and spec.same_as is None and spec.shapes[0]
    ]  # fmt: skip
    if not fitting or (draft.has_buckets and not draft.chance(8)):
        return
    spec = draft.choose(*fitting)
    layout = "overlapping" if wanted == "offset" else "contiguous"
    dims = draft.dims(spec.name)
    other = draft.argument(dims, spec.values, spec.dtype, layout=layout, same_as=spec.name, name=draft.fresh("same"))
    if draft.chance(3):
        draft.block(draft.choose(f"{spec.name}.add_(1)", f"{other}.mul_(2)", f"{other}.copy_({spec.name} * 2)"))
    draft.let(draft.choose(f"{spec.name} * 2 - {other}", f"torch.cat([{other}, {spec.name}])"))


STEPS = (
    twice,
    twice,
    keep_last,
    keep_last,
    counter,
    average,
    cache,
    ring,
    exchange,
    exchange,
    write,
    write,
    write,
    read_and_write,
    read_and_write,
    parameter,
    hidden,
)
