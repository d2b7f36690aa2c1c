"""Time by module as a tree that opens: model, its layers as one row, their parts.

Equal layers of a list are one branch, "layers.0 to 31 x 32", so that a deep model is as short as a flat one. The row of
a module has the time of all that is in it. What the operators of the module itself take, outside of its children, is
the row "itself".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kp_dynamo.page.content import Branch, Cell, Share
from kp_dynamo.page.limits import ModuleRow, bound_of
from kp_dynamo.page.units import FAR_APART, time_text

HEAD = ("module", "time", "share", "over the bound", "bound by")
CAPTION = (
    "The bound is the longer of two times: the matmuls at the chip's peak, and the bytes to and from its memory at its "
    f"bandwidth. A row that takes more than {FAR_APART:.0f} times its bound is bound by nothing known. A fusion counts "
    "for the modules of its matmuls; if it has none, equally for the modules of its operators. Weights that are copied "
    "to fast memory ahead of their use count outside of submodules."
)
_MIN_SHARE = 0.0005
_LARGE_PART = 0.5


@dataclass
class _Module:
    name: str
    kind: str = ""
    own: list[ModuleRow] = field(default_factory=list)
    children: dict[str, _Module] = field(default_factory=dict)
    count: int = 1

    def rows(self) -> Iterator[ModuleRow]:
        """Its own, and those of all its children."""
        yield from self.own
        for child in self.children.values():
            yield from child.rows()

    @property
    def ms(self) -> float:
        return sum(row.ms for row in self.rows())


def module_branches(
    rows: Iterable[ModuleRow], model: str, outside: Mapping[str, Sequence[ModuleRow]]
) -> tuple[Branch, ...]:
    """The tree of a model of the class `model`, and a row for each kind of work `outside` of its modules."""
    root = _Module(model)
    for row in rows:
        _add(root, row)
    times = {label: sum(row.ms for row in found) for label, found in outside.items()}
    whole = root.ms + sum(times.values())
    branches = [_opened(_branch(_folded(root), whole, is_root=True))] if root.ms else []
    shown = [label for label, ms in times.items() if ms > _MIN_SHARE * whole]
    return (*branches, *(Branch(label, "", _cells(outside[label], whole)) for label in shown))


def _add(root: _Module, row: ModuleRow) -> None:
    module = root
    for name in row.path.split(".") if row.path else ():
        module = module.children.setdefault(name, _Module(name))
    module.own.append(row)
    module.kind = module.kind or (row.kind if row.path else "")


def _folded(module: _Module) -> _Module:
    """The module with its equal numbered children as one."""
    children = [_folded(child) for child in module.children.values()]
    alike: defaultdict[object, list[_Module]] = defaultdict(list)
    for child in children:
        alike[_likeness(child) if child.name.isdecimal() else child.name].append(child)
    merged = map(_merged, alike.values())
    return _Module(module.name, module.kind, module.own, {child.name: child for child in merged}, module.count)


def _likeness(module: _Module) -> object:
    """Layers of one class are alike; without a class, those with the same children are."""
    return (module.kind,) if module.kind else tuple(sorted((c.name, c.kind) for c in module.children.values()))


def _merged(group: Sequence[_Module]) -> _Module:
    if len(group) == 1:
        return group[0]
    merged = _Module(_numbers([int(module.name) for module in group]), group[0].kind, count=len(group))
    for module in group:
        _add_to(merged, module)
    return merged


def _add_to(merged: _Module, module: _Module) -> None:
    """Add the rows of a module, and of its children to their namesakes."""
    merged.own.extend(module.own)
    for child in module.children.values():
        _add_to(merged.children.setdefault(child.name, _Module(child.name, child.kind, count=child.count)), child)


def _numbers(numbers: Sequence[int]) -> str:
    """ "0 to 31", or "0, 2, 4"."""
    first, last = min(numbers), max(numbers)
    is_range = last - first + 1 == len(numbers) > 2
    return f"{first} to {last}" if is_range else ", ".join(map(str, sorted(numbers)))


def _branch(module: _Module, whole: float, is_root: bool = False) -> Branch:
    label = f"{module.name} x {module.count}" if module.count > 1 else module.name
    children = sorted(module.children.values(), key=lambda child: -child.ms)
    below = [_branch(child, whole) for child in children if child.ms > _MIN_SHARE * whole]
    own_ms = sum(row.ms for row in module.own)
    if len(below) == 1 and not (module.own or module.kind or is_root):  # a list of equal layers is one row
        return Branch(f"{label}.{below[0].label}", below[0].detail, below[0].cells, below[0].children)
    if below and own_ms > _MIN_SHARE * whole:
        below.append(Branch("itself", "", _cells(module.own, whole)))
    return Branch(label, module.kind, _cells(list(module.rows()), whole), tuple(below))


def _opened(branch: Branch) -> Branch:
    """Open, and so is the child that has most of it, down to the row of which no child has most."""
    children = [_opened(child) if _share(child) >= _LARGE_PART * _share(branch) else child for child in branch.children]
    return replace(branch, children=tuple(children), is_open=True)


def _share(branch: Branch) -> float:
    return next(cell.of_one for cell in branch.cells if isinstance(cell, Share))


def _cells(rows: Sequence[ModuleRow], whole: float) -> tuple[Cell, ...]:
    ms = sum(row.ms for row in rows)
    by, over = bound_of(rows)
    shown = f"{over:.1f}x" if 1 <= over < 100 else "-"  # below 1 is what overlaps with other work
    return time_text(ms), Share(ms / whole), shown, by
