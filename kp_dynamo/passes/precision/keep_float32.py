"""Nodes that the user keeps in float32: ATen op names ("aten.mm") and globs of module paths ("model.layers.*.mlp")."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

import torch
from torch import fx

import kp_dynamo.ops  # noqa: F401  # registers kp::linear_act and others, names like any other
from kp_dynamo.graph.module_paths import module_paths

_NAMESPACES = ("aten", "kp", "prims")
_CROSS_ENTROPY = ("linear_cross_entropy", "linear_cross_entropy_backward")
_ATTENTION = ("attention", "attention_train", "attention_backward")
# Ops that graphs hold in other forms: the op that the user names -> its decomposed or fused forms.
_FORMS: dict[str, tuple[str, ...]] = {
    "linear": ("mm", "addmm", "linear_act", "linear_act_train", *_CROSS_ENTROPY),
    "matmul": ("mm", "bmm", *_ATTENTION, *_CROSS_ENTROPY),
    "einsum": ("mm", "bmm", *_ATTENTION),
    "bmm": _ATTENTION,
    "attention": _ATTENTION,
    "scaled_dot_product_attention": ("bmm", "baddbmm", *_ATTENTION),
    "mm": ("linear_act", "linear_act_train", *_CROSS_ENTROPY),
    "addmm": ("linear_act", "linear_act_train", *_CROSS_ENTROPY),
    "linear_act": ("linear_act_train",),
    "linear_cross_entropy": _CROSS_ENTROPY,
    "convolution": ("convolution_backward",),
    **{f"conv{dims}d": ("convolution", "convolution_backward") for dims in (1, 2, 3)},
}


@dataclass(frozen=True)
class KeepFloat32:
    """Decides which nodes stay in float32, with the reason.

    A name without dots may be both an op and a module ("linear"). It then keeps both: too much float32 is only slow.
    """

    names: tuple[str, ...]

    def reason(self, node: fx.Node) -> str | None:
        """Why `node` stays in float32, or None; a backward node has the module of its forward node."""
        ops = _names_of(node.target) if isinstance(node.target, torch._ops.OpOverload) else ()
        for name in self.names:
            if _bare(name) in ops or any(fnmatchcase(path, name) for path in module_paths(node)):
                return f"kept in float32 by {name!r}"
        return None


def unknown_op_names(names: Iterable[str]) -> tuple[str, ...]:
    """Those of `names` that are spelled as an op but do not exist: "aten.mn", "aten::mm.defualt"."""
    return tuple(name for name in names if _bare(name) != name and not _exists(name))


@lru_cache(maxsize=1024)
def _names_of(target: torch._ops.OpOverload) -> frozenset[str]:
    """The names of an op, "mm" and "mm.default", and those of the ops that it is a form of."""
    own = target._schema.name.split("::")[1]
    names = {own, *(name for name, forms in _FORMS.items() if own in forms)}
    return frozenset(names | {f"{name}.{target._overloadname}" for name in names})


def _bare(name: str) -> str:
    """The name without its namespace, if it has one: "aten::mm" and "aten.mm" are "mm"."""
    namespace, _, rest = name.replace("::", ".").partition(".")
    return rest if namespace in _NAMESPACES or "::" in name else name


def _exists(name: str) -> bool:
    namespace, packet, *overload = name.replace("::", ".").split(".")
    op = getattr(getattr(torch.ops, namespace), packet, None)
    return isinstance(op, torch._ops.OpOverloadPacket) and (not overload or ".".join(overload) in op.overloads())
