"""A dict of module-path patterns, applied to a model: which rule each parameter gets.

A pattern is a path as in `named_modules` or `named_parameters`. `*` stands for one name of the path or a part of it,
never for several: `layers.*.mlp.up` is `layers.0.mlp.up`, as in transformers' plans. A pattern of a module rules the
module's own parameters, not those of its children. One that names the parameter itself comes before it.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

import torch
from torch import nn

from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.sharding.mesh import MODEL, NamedMesh
from kp_dynamo.sharding.placement import Placement, check_placement
from kp_dynamo.sharding.words import WORDS, check_word, divided_dim


@dataclass(frozen=True)
class _Parameter:
    """A parameter or a buffer of a module."""

    path: str
    name: str
    owner: nn.Module
    tensor: torch.Tensor

    @property
    def module_path(self) -> str:
        return self.path.rpartition(".")[0]


@dataclass(frozen=True)
class Ruled:
    """The placement of a tensor, and the pattern that it comes from."""

    placement: Placement
    pattern: str


def ruled(model: nn.Module, mesh: NamedMesh, rules: Mapping[str, Any], *, is_own_plan: bool) -> dict[str, Ruled]:
    """The placement of each parameter or buffer that a rule names, by its path.

    `is_own_plan`: the model brings the rules itself. Then patterns may match nothing, because transformers' plans name
    parts that only some sizes of a model have.

    Raises:
        TPUConfigurationError: A pattern matches nothing, two contradict each other, or a rule is invalid.
    """
    found = list(_tensors(model))
    by_parameter: dict[str, list[tuple[bool, Ruled]]] = defaultdict(list)
    for pattern, rule in rules.items():
        _check_rule(pattern, rule, mesh)
        matched = _matches(pattern, found)
        if not matched and not is_own_plan and not _is_repeated(pattern, rules):
            raise _matches_nothing(model, pattern, found)
        for parameter, is_named in matched:
            placement = _placement(parameter, rule, pattern, mesh, is_named)
            by_parameter[parameter.path].append((is_named, Ruled(placement, pattern)))
    return {path: _agreed(path, candidates) for path, candidates in by_parameter.items()}


def _is_repeated(pattern: str, rules: Mapping[str, Any]) -> bool:
    """Whether the same pattern is there below a prefix: `tp_plan` lists "layers.*" and "model.layers.*"."""
    return any(other.endswith(f".{pattern}") and rules[other] == rules[pattern] for other in rules)


def _tensors(model: nn.Module) -> Iterator[_Parameter]:
    """All parameters, then all buffers, under each of their names."""
    modules = list(model.named_modules(remove_duplicate=False))
    for kind in ("_parameters", "_buffers"):
        for path, module in modules:
            for name, tensor in getattr(module, kind).items():
                if tensor is not None:
                    yield _Parameter(f"{path}.{name}" if path else name, name, module, tensor)


def _check_rule(pattern: Any, rule: Any, mesh: NamedMesh) -> None:
    if not isinstance(pattern, str) or not pattern:
        raise TPUConfigurationError(f"sharding has the key {pattern!r}. Allowed: paths of modules or parameters.")
    if isinstance(rule, str):
        check_word(rule, pattern)
        if WORDS[rule] != "nothing":
            mesh.size(MODEL)
        return
    is_axes = isinstance(rule, tuple | list) and all(
        axes is None or isinstance(axes, str) or (isinstance(axes, tuple) and all(isinstance(a, str) for a in axes))
        for axes in rule
    )
    if not is_axes:
        raise TPUConfigurationError(
            f"sharding={{{pattern!r}: {rule!r}}} is invalid. Allowed: a word such as 'colwise', or a tuple with a mesh "
            "axis, a tuple of mesh axes or None for each dimension."
        )
    check_placement(tuple(rule), mesh, len(rule))


def _matches(pattern: str, found: list[_Parameter]) -> list[tuple[_Parameter, bool]]:
    """The tensors that a pattern rules; True for those that it names themselves. Buffers must be named."""
    names = [re.compile(translate(name)) for name in pattern.split(".")]

    def is_match(path: str) -> bool:
        parts = path.split(".")
        return len(parts) == len(names) and all(name.match(part) for name, part in zip(names, parts, strict=True))

    named = [(parameter, True) for parameter in found if is_match(parameter.path)]
    of_modules = [
        (parameter, False)
        for parameter in found
        if parameter.module_path and is_match(parameter.module_path) and parameter.name in parameter.owner._parameters
    ]
    return [*named, *of_modules]


def _placement(parameter: _Parameter, rule: Any, pattern: str, mesh: NamedMesh, is_named: bool) -> Placement:
    rank = parameter.tensor.dim()
    if isinstance(rule, str):
        dim = divided_dim(rule, parameter.owner, parameter.name, parameter.tensor, is_named)
        return tuple(MODEL if i == dim else None for i in range(rank))
    if len(rule) != rank:
        padded = (*rule, *[None] * rank)[:rank]
        itself = f"{padded!r}" if is_named else f"a rule for {f'{pattern}.{parameter.name}'!r}"
        raise TPUConfigurationError(
            f"sharding={{{pattern!r}: {rule!r}}} is invalid for {parameter.path} {list(parameter.tensor.shape)}: it "
            f"has {len(rule)} of {rank} entries. Allowed: one for each dimension. Try: {itself}."
        )
    try:
        check_placement(tuple(rule), mesh, rank)
    except TPUConfigurationError as problem:
        raise TPUConfigurationError(f"sharding={{{pattern!r}: {rule!r}}} for {parameter.path}: {problem}") from None
    return tuple(rule)


def _agreed(path: str, candidates: list[tuple[bool, Ruled]]) -> Ruled:
    """The rule of a parameter: of those that name it, or else of those that name its module."""
    named = [rule for is_named, rule in candidates if is_named]
    first, *others = named or [rule for _, rule in candidates]
    for other in others:
        if other.placement != first.placement:
            raise TPUConfigurationError(
                f"sharding has two rules for {path}: {first.pattern!r} makes it {first.placement}, {other.pattern!r} "
                f"makes it {other.placement}. Allowed: rules that agree. Try: name the parameter itself in a rule of "
                "its own, which comes before those of its module."
            )
    return first


def _matches_nothing(model: nn.Module, pattern: str, found: list[_Parameter]) -> TPUConfigurationError:
    names = re.compile(r"[^.]+".join(re.escape(part) for part in pattern.split("*")) + "$")
    is_parent = any(names.match(path) for path, _ in model.named_modules())
    if is_parent:
        return TPUConfigurationError(
            f"sharding names {pattern!r}, a module without parameters of its own. Allowed: modules with parameters, "
            f"and parameters. Try: {pattern + '.*'!r} for its children."
        )
    paths = dict.fromkeys(path for p in found for path in (p.module_path, p.path) if path)
    nearest = difflib.get_close_matches(pattern, paths, n=1, cutoff=0.0)
    hint = f" The nearest is {nearest[0]!r}." if nearest else " The model has no parameters."
    return TPUConfigurationError(
        f"sharding names {pattern!r}, which matches no module and no parameter of the {type(model).__name__}.{hint} "
        "Allowed: paths as in named_modules(), where * stands for one name."
    )
