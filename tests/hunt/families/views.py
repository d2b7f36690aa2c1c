"""Results that are views of inputs, of each other, of state, at offsets that hang on sizes."""

from __future__ import annotations

from tests.hunt.draft import Draft
from tests.hunt.families.state import twice
from tests.hunt.families.wanted import any_of

_ONE = (
    "{0}[1:]", "{0}[:-1]", "{0}[:, 1:]", "{0}[:, :-1]", "{0}[-1]", "{0}[:, -1]", "{0}[0]", "{0}[:, 0]", "{0}[..., 1:]",
    "{0}[::2]", "{0}[:, ::2]", "{0}[1::2]", "{0}.t()", "{0}.transpose(0, 1)", "{0}.view(-1)", "{0}[None]",
    "{0}.narrow(0, 1, {0}.shape[0] - 1)", "{0}.narrow(1, {0}.shape[1] // 2, {0}.shape[1] - {0}.shape[1] // 2)",
    "{0}[{0}.shape[0] // 2:]", "{0}[:, {0}.shape[1] // 2:]", "{0}[:{0}.shape[0] // 2]", "{0}.unsqueeze(0)",
    "{0}.expand_as({0})", "{0}.detach()", "{0}.view_as({0})", "{0}.diagonal()", "{0}.select(0, {0}.shape[0] - 1)",
    "{0}.unfold(0, 2, 1)", "{0}.permute(2, 0, 1)", "{0}.flatten(0, 1)", "{0}.squeeze()", "{0}",
    "{0}[-2:]", "{0}[:, -2:]", "{0}[..., -1:]", "{0}.movedim(0, 1)", "{0}.swapaxes(0, -1)", "{0}[1:, 1:]", "{0}.mT",
    "{0}.reshape({0}.shape)", "{0}.expand(3, *{0}.shape)", "{0}.view({0}.shape[0], -1)", "{0}.permute(1, 0)",
    "{0}.contiguous()", "{0}.to({0}.dtype)", "{0}.float()", "{0}.chunk(2)[1]", "{0}.chunk(2, -1)[1]", "{0}[1:].t()",
    "{0}.as_strided((2, 2), (2, 1), 1)", "{0}.as_strided((3,), (2,), 0)",
    "{0}.transpose(0, 1)[1:]", "{0}[1:][1:]", "{0}.unflatten(0, (1, -1))[0]", "{0}.T[-1]",
)  # fmt: skip
_TWO = (
    "{1}, {2} = {0}.chunk(2)", "{1}, {2} = {0}.chunk(2, -1)", "{1}, {2} = {0}.chunk(2, 1)",
    "{1}, {2} = {0}[:1], {0}[1:]", "{1}, {2} = {0}.split([1, {0}.shape[0] - 1])",
    "{1}, {2} = {0}.split({0}.shape[1] // 2 + 1, 1)", "{1}, {2} = {0}[0], {0}[-1]", "{1}, {2} = {0}.unbind(0)[:2]",
    "{1}, {2} = {0}, {0}.t()", "{1}, {2} = {0}[::2], {0}[1::2]", "{1}, {2} = {0}.tensor_split(2)",
    "{1}, {2} = {0}.split(2)[:2]", "{1}, {2} = {0}.view(-1), {0}", "{1}, {2} = {0}[:, :1], {0}[:, 1:]",
    "{1}, {2} = {0}.unbind(-1)[:2]",
)  # fmt: skip


def one(draft: Draft) -> None:
    x = draft.pick(any_of(1, 2, 3)) if draft.chance(2) else _input(draft)
    if x is not None:
        draft.let(draft.choose(*_ONE).format(x), "view")


def two(draft: Draft) -> None:
    x = draft.pick(any_of(1, 2, 3)) if draft.chance(2) else _input(draft)
    if x is not None:
        first, second = draft.fresh("view"), draft.fresh("view")
        draft.block(draft.choose(*_TWO).format(x, first, second), first, second)


def _input(draft: Draft) -> str | None:
    names = draft.inputs_like(any_of(1, 2, 3))
    return draft.choose(*names) if names else None


def table(draft: Draft) -> None:
    """Rows of a table of positions: a view of a buffer, whose offset may hang on a size."""
    x = draft.pick(any_of(2, 3))
    if x is None:
        return
    width = draft.value(x).shape[-1]
    longest = max(call[x].shape[-2] for call in draft.calls)
    table = draft.buffer(f"torch.linspace(-1, 1, {2 * longest * width}).reshape({2 * longest}, {width})", "table")
    length = f"{x}.shape[-2]"
    rows = draft.choose(
        f"[:{length}]", f"[{length}:]", f"[{length}:2 * {length}]", f"[1:{length} + 1]", f"[-{length}:]"
    )
    name = draft.let(f"{table}{rows}", "view")
    if name is not None and draft.chance(2):
        draft.let(f"{x} + {name}")


def written(draft: Draft) -> None:
    """A view that is taken before or after its base is written."""
    names = [i.name for i in draft.inputs if not i.requires_grad and len(i.shapes[0]) in (1, 2, 3)]
    if not names or (draft.has_buckets and not draft.chance(25)):
        return
    x, view = draft.choose(*names), draft.fresh("view")
    take = f"{view} = " + draft.choose(*_ONE).format(x)
    write = draft.choose(
        f"{x}.add_(1)",
        f"{x}[0] = 2",
        f"{x}.mul_(2)",
        f"{view}.add_(1)",
        f"{view}.mul_(2)",
        f"{view}.zero_()",
        f"{x}.as_strided((2, 2), (3, 1), 1).fill_(-1)",
    )
    before = f"{write}\n{take}" if view not in write and draft.chance(2) else f"{take}\n{write}"
    draft.block(before, view)


STEPS = (one, one, two, two, table, written, twice)
