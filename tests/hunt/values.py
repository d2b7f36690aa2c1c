"""Values of inputs, by recipe: a word and its numbers."""

from __future__ import annotations

import torch

Shape = tuple[int, ...]


def make(recipe: str, shape: Shape, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values of `recipe` on the CPU, in fresh memory."""
    word, *numbers = recipe.split()
    generator = torch.Generator().manual_seed(seed)
    values = _RECIPES[word](shape, generator, *map(float, numbers))
    return values.to(dtype).clone()


def _normal(shape: Shape, generator: torch.Generator, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=generator) * scale


def _large(shape: Shape, generator: torch.Generator, mean: float, deviation: float = 1.0) -> torch.Tensor:
    return mean + deviation * torch.randn(shape, generator=generator)


def _positive(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    return 0.1 + torch.rand(shape, generator=generator)


def _unit(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Inside (0, 1), away from both ends."""
    return 0.05 + 0.9 * torch.rand(shape, generator=generator)


def _quarters(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-16, 17, shape, generator=generator) / 4


def _below(shape: Shape, generator: torch.Generator, high: float, low: float = 0) -> torch.Tensor:
    return torch.randint(int(low), int(high), shape, generator=generator)


def _bool(shape: Shape, generator: torch.Generator, share: float = 0.7) -> torch.Tensor:
    return torch.rand(shape, generator=generator) < share


def _padded(shape: Shape, generator: torch.Generator, side: float) -> torch.Tensor:
    """[B, L] of 1 where a token is, rows of different lengths, each at least 1; side 0: padding on the left."""
    length = shape[-1]
    lengths = torch.randint(1, length + 1, (*shape[:-1], 1), generator=generator)
    places = torch.arange(length)
    return (places < lengths if side else places >= length - lengths).long()


def _probabilities(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator).softmax(-1)


def _extreme(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Normal numbers, among them infinities and NaN."""
    values = torch.randn(shape, generator=generator)
    choice = torch.randint(0, 12, shape, generator=generator)
    for number, special in enumerate((float("inf"), float("-inf"), float("nan"))):
        values = torch.where(choice == number, special, values)
    return values


def _permutation(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=generator).argsort(-1)


_RECIPES = {
    "normal": _normal,
    "large": _large,
    "positive": _positive,
    "unit": _unit,
    "quarters": _quarters,
    "below": _below,
    "bool": _bool,
    "padded": _padded,
    "probabilities": _probabilities,
    "extreme": _extreme,
    "permutation": _permutation,
}
