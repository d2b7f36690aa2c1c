"""Custom autograd functions, defined before the model."""

from __future__ import annotations

from tests.hunt.draft import Draft
from tests.hunt.families.wanted import floats

_FUNCTIONS = {
    "ScaleGradient": """
        class ScaleGradient(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.view_as(x)

            @staticmethod
            def backward(ctx, g):
                return g * 0.1
    """,
    "StraightThrough": """
        class StraightThrough(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.sign()

            @staticmethod
            def backward(ctx, g):
                return g.clamp(-1, 1)
    """,
    "SavedExp": """
        class SavedExp(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                y = torch.exp(x.clamp(max=3))
                ctx.save_for_backward(y)
                return y

            @staticmethod
            def backward(ctx, g):
                (y,) = ctx.saved_tensors
                return g * y
    """,
    "Reverse": """
        class Reverse(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, g):
                return -g
    """,
    "Clamped": """
        class Clamped(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x.clamp(-0.5, 0.5)

            @staticmethod
            def backward(ctx, g):
                (x,) = ctx.saved_tensors
                return torch.where(x.abs() < 0.5, g, torch.zeros_like(g))
    """,
    "Tracked": """
        class Tracked:
            @staticmethod
            def apply(x):
                with torch.enable_grad():
                    return x.sin() * 2
    """,
    "Untracked": """
        class Untracked:
            @staticmethod
            def apply(x):
                with torch.no_grad():
                    return x.sin() * 2
    """,
    "Cubed": """
        class Cubed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                ctx.power = 3
                return x ** 3

            @staticmethod
            def backward(ctx, g):
                (x,) = ctx.saved_tensors
                return ctx.power * x ** 2 * g
    """,
}
_PAIRS = {
    "Product": """
        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, y):
                ctx.save_for_backward(x, y)
                return x * y

            @staticmethod
            def backward(ctx, g):
                x, y = ctx.saved_tensors
                return g * y, g * x
    """,
    "FirstOnly": """
        class FirstOnly(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, y):
                ctx.save_for_backward(y)
                return x * y

            @staticmethod
            def backward(ctx, g):
                (y,) = ctx.saved_tensors
                return g * y, None
    """,
    "Both": """
        class Both(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, y):
                return x + y

            @staticmethod
            def backward(ctx, g):
                return g * 2 if ctx.needs_input_grad[0] else None, g * 3 if ctx.needs_input_grad[1] else None
    """,
}

_WITH_TWO_RESULTS = {
    "ProductAndPower": """
        class ProductAndPower(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, y):
                ctx.save_for_backward(x, y)
                return x * y, torch.exp(-x.abs())

            @staticmethod
            def backward(ctx, of_product, of_power):
                x, y = ctx.saved_tensors
                return of_product * y - of_power * x.sign() * torch.exp(-x.abs()), of_product * x
    """,
    "SortedWithPlaces": """
        class SortedWithPlaces(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, y):
                values, places = (x + y).sort(-1)
                ctx.save_for_backward(places)
                ctx.mark_non_differentiable(places)
                return values, places

            @staticmethod
            def backward(ctx, g, _):
                (places,) = ctx.saved_tensors
                g = torch.zeros_like(g).scatter(-1, places, g)
                return g, g
    """,
}


def of_one(draft: Draft) -> None:
    x = draft.pick(floats(1, 2, 3))
    name = draft.choose(*_FUNCTIONS)
    if x is not None:
        draft.define(_FUNCTIONS[name])
        draft.let(f"{name}.apply({x})")


def of_two(draft: Draft) -> None:
    x = draft.pick(floats(1, 2, 3))
    if x is None:
        return
    name, y = draft.choose(*_PAIRS), draft.like(x) or x
    draft.define(_PAIRS[name])
    draft.let(f"{name}.apply({x}, {y})")


def with_two_results(draft: Draft) -> None:
    x = draft.pick(floats(1, 2, 3))
    if x is None:
        return
    name, y = draft.choose(*_WITH_TWO_RESULTS), draft.like(x) or x
    draft.define(_WITH_TWO_RESULTS[name])
    first, second = draft.fresh("h"), draft.fresh("h")
    draft.block(f"{first}, {second} = {name}.apply({x}, {y})", first, second)


STEPS = (of_one, of_one, of_two, with_two_results)
