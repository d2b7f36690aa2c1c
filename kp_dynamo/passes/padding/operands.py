"""The operand layouts that a rule declares, and the code that gives each operand its layout.

The *layout* of a dimension is where its true elements are: its atoms. It is *canonical* where they come first, in one
atom; then equal sizes mean equal layouts. A rule without a declaration gets canonical operands. A rule that can take
merged dimensions declares a term for each such operand, in einsum notation:

    @rule(aten.addmm.default, layouts={"self": "ij", "mat1": "ik", "mat2": "kj"})

* A letter stands for a dimension, counted from the last. Dimensions with the same letter get the same layout, that of
  the operand with the most atoms; if their sizes are not proven equal, each is canonical.
* `...` stands for the leading dimensions, which broadcast: those equally far from the last get the same layout.
* `_` is a dimension that is always canonical.
* Operands without a term are canonical. A string in place of the dict is the term of every operand.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from torch.utils import _pytree as pytree

from kp_dynamo.passes.padding.atoms import Atoms, Padded, Refused, Symbolic, equal_sizes, has_tail, is_padded, product
from kp_dynamo.passes.padding.call import Call
from kp_dynamo.passes.padding.layout import aligned, with_one_atom
from kp_dynamo.passes.padding.masks import Masks

Layouts = str | Mapping[str, str] | None
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def with_layouts(call: Call, layouts: Layouts) -> Call:
    """The call with its operands in the layouts that a rule declares."""
    terms = [layouts if isinstance(layouts, str) else (layouts or {}).get(name) for name, _ in _tensors(call)]
    operands = call.operands()
    labels = [_labels(term, len(x.dims)) for x, term in zip(operands, terms, strict=True)]
    chosen = _chosen(operands, labels)
    return call.with_operands([_moved(call.masks, x, names, chosen) for x, names in zip(operands, labels, strict=True)])


def _moved(masks: Masks, x: Padded, labels: list[str], chosen: Mapping[str, Atoms]) -> Padded:
    """`x` in the chosen layouts; canonical in dimensions without one."""
    for d, label in enumerate(labels):
        if label not in chosen:
            x = with_one_atom(masks, x, d)
    return aligned(masks, x, tuple(chosen.get(label, x.dims[d]) for d, label in enumerate(labels)))


def with_canonical(dims: int | slice, rank: int) -> str:
    """A term for operands of a rank: `dims` are canonical, and the others share their layouts."""
    letters = list(_LETTERS[:rank])
    for d in range(rank)[dims] if isinstance(dims, slice) else [range(rank)[dims]]:
        letters[d] = "_"
    return "".join(letters)


def _labels(term: str | None, rank: int) -> list[str]:
    """The label of each dimension: a letter, `_`, or its distance from the last dimension of `...`."""
    if term is None:
        return ["_"] * rank
    letters = list(term.removeprefix("..."))
    if rank <= len(letters):
        return letters[len(letters) - rank :]
    assert term.startswith("..."), f"{term} does not name the {rank} dimensions of an operand"
    before = rank - len(letters)
    return [f"...{before - i}" for i in range(before)] + letters


def _chosen(operands: list[Padded], labels: list[list[str]]) -> dict[str, Atoms]:
    """For each label, the layout of the operand with the most atoms; none if sizes are not proven equal."""
    found: dict[str, list[Atoms]] = {}
    for x, names in zip(operands, labels, strict=True):
        for atoms, label in zip(x.dims, names, strict=True):
            found.setdefault(label, []).append(atoms)
    found.pop("_", None)
    return {label: max(layouts, key=len) for label, layouts in found.items() if _are_equal(filter(None, layouts))}


def _are_equal(layouts: Iterable[Atoms]) -> bool:
    first, *others = [product(atoms) for atoms in layouts] or [1]
    return all(equal_sizes(first, size) for size in others)


def _arguments(call: Call) -> Iterator[tuple[Any, Any]]:
    """The arguments that are given, each with its declaration in the operator's schema."""
    declared = call.target._schema.arguments
    yield from zip(declared, call.args, strict=False)
    by_name = {argument.name: argument for argument in declared}
    yield from ((by_name[name], value) for name, value in call.kwargs.items())


def _tensors(call: Call) -> Iterator[tuple[str, Padded]]:
    """Name and value of each operand, in the order of `call.operands()`."""
    for argument, value in _arguments(call):
        for leaf in pytree.tree_leaves(value, is_leaf=lambda x: isinstance(x, Padded)):
            if isinstance(leaf, Padded):
                yield argument.name, leaf


# Arguments that are sizes of tensors: a rule gets padded sizes, like those of its tensors. Strides are not sizes.
_SIZES = (
    "size", "shape", "input_sizes", "bias_sizes", "normalized_shape", "num_weights", "n", "m", "repeats", "split_size",
    "split_sizes", "batch_dims",
)  # fmt: skip


def require_no_length_as_number(call: Call, taken: Container[str]) -> None:
    """Refuse a length in an argument that is not a size: the operator would use the padded length.

    Args:
        call: The call.
        taken: Names of the arguments for which the rule itself uses the true length.
    """
    for argument, value in _arguments(call):
        is_size = _element(argument.real_type) == "SymIntType" and argument.name in _SIZES
        if is_size or argument.name in taken:
            continue
        if any(isinstance(leaf, Symbolic) and is_padded(leaf) for leaf in pytree.tree_leaves(value)):
            raise Refused(f"the length is used as its argument {argument.name}")


def _element(kind: Any) -> str:
    """The element type of a schema type: without optionals and lists."""
    while kind.kind() in ("OptionalType", "ListType"):
        kind = kind.getElementType()
    return str(kind.kind())


def is_concerned(call: Call) -> bool:
    """Whether an argument is padded or is a length."""
    leaves = pytree.tree_leaves((call.args, call.kwargs), is_leaf=lambda x: isinstance(x, Padded))
    return any(any(map(has_tail, x.dims)) if isinstance(x, Padded) else isinstance(x, Symbolic) for x in leaves)
