"""Random stacks of random layers: a plan is drawn, and the model that it describes is built with random weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

BATCH, LENGTH, WIDTH = 2, 4, 8
_ACTIVATIONS = {"relu": torch.relu, "gelu": F.gelu, "tanh": torch.tanh, "silu": F.silu}


@dataclass(frozen=True)
class LayerPlan:
    """One layer.

    Attributes:
        parts: Names of `_Part`s, in their order.
        residual: How the input is added to the result: "no", "add", or "in place".
    """

    parts: tuple[str, ...]
    residual: str


@dataclass(frozen=True)
class Stage:
    """Equal layers, or one layer that is called several times."""

    layer: LayerPlan
    count: int
    shares_weights: bool


@dataclass(frozen=True)
class StackPlan:
    """A model.

    Attributes:
        stages: Its layers.
        skips: (number of a layer, number of a later one that also reads its result).
        is_embedded: Whether a Linear precedes the layers, and one follows.
        is_embedding_frozen: Whether the first layer gets no gradient from it.
        returns_states: Whether it returns the result of every layer.
        frozen: The numbers of the layers whose first parameter is frozen.
    """

    stages: tuple[Stage, ...]
    skips: tuple[tuple[int, int], ...]
    is_embedded: bool
    is_embedding_frozen: bool
    returns_states: bool
    frozen: tuple[int, ...]


class _Part(nn.Module):
    """A Linear, a norm, an activation, an attention or a convolution, from [B, S, D] to [B, S, D]."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        if name in ("linear", "linear, relu_", "attention"):
            self.linear = nn.Linear(WIDTH, 3 * WIDTH if name == "attention" else WIDTH)
        elif name == "conv":
            self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        elif name in ("layer norm", "batch norm"):
            self.norm = nn.LayerNorm(WIDTH) if name == "layer norm" else nn.BatchNorm1d(LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.name == "attention":
            q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.linear(x).chunk(3, -1))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        if self.name == "conv":
            return self.conv(x.mT).mT
        if self.name in ("layer norm", "batch norm"):
            return self.norm(x)
        if self.name in _ACTIVATIONS:
            return _ACTIVATIONS[self.name](x)
        return torch.relu_(self.linear(x)) if self.name == "linear, relu_" else self.linear(x)


class _Layer(nn.Module):
    def __init__(self, plan: LayerPlan) -> None:
        super().__init__()
        self.parts, self.residual = nn.ModuleList(map(_Part, plan.parts)), plan.residual
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for part in self.parts:
            h = part(h)
        h = self.last(h)  # whose backward does not read its result, which may be written to
        if self.residual == "in place":
            h += x
            return h
        return x + h if self.residual == "add" else h


class RandomStack(nn.Module):
    """The model of a plan."""

    def __init__(self, plan: StackPlan) -> None:
        super().__init__()
        self.plan = plan
        self.embed = nn.Linear(WIDTH, WIDTH).requires_grad_(not plan.is_embedding_frozen)
        self.head = nn.Linear(WIDTH, 3)
        layers = []
        for stage in plan.stages:
            made = [_Layer(stage.layer) for _ in range(1 if stage.shares_weights else stage.count)]
            layers += made * stage.count if stage.shares_weights else made
        self.layers = nn.ModuleList(layers)
        for number in plan.frozen:
            next(layers[number % len(layers)].parameters()).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, states = self.embed(x) if self.plan.is_embedded else x, []
        for number, layer in enumerate(self.layers):
            for first, last in self.plan.skips:
                if last == number:
                    x = x + states[first]
            x = layer(x)
            states.append(x)
        return self.head(x) if self.plan.is_embedded else x, states if self.plan.returns_states else []


_PARTS = ("linear", "linear, relu_", "attention", "conv", "layer norm", "batch norm", *_ACTIVATIONS)
_LAYERS = st.builds(
    LayerPlan,
    st.lists(st.sampled_from(_PARTS), min_size=2, max_size=4).map(tuple),
    st.sampled_from(("add", "add", "in place", "no")),
)


@st.composite
def stack_plans(draw: st.DrawFn, counts: tuple[int, int] = (3, 4)) -> StackPlan:
    """Plans of one or two stages; `counts` are the fewest and the most layers of one."""
    of_stage = st.builds(Stage, _LAYERS, st.integers(*counts), st.sampled_from((False, False, True)))
    stages = tuple(draw(st.lists(of_stage, min_size=1, max_size=2)))
    num_layers = sum(stage.count for stage in stages)
    pairs = st.tuples(st.integers(0, num_layers - 2), st.integers(1, num_layers - 1)).filter(lambda p: p[0] < p[1])
    skips = tuple(draw(st.lists(pairs, max_size=3)))
    flags = st.booleans()
    frozen = tuple(draw(st.lists(st.integers(0, num_layers - 1), max_size=1)))
    return StackPlan(stages, skips, draw(flags), draw(flags), draw(flags), frozen)
