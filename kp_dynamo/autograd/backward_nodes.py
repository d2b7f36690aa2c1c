"""The backward nodes of the calls of a compiled graph: autograd runs one as the backward of one call.

Who looks for the node among the `grad_fn`s of the results may find that of another graph: a result may be an input,
which an earlier compiled graph computed. So the autograd function itself gives each of its nodes away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # first: torch 2.9 cannot import the next module without it
from torch._functorch._aot_autograd.runtime_wrappers import RuntimeWrapper

NodeHook = Callable[[Any], None]
"""Takes the node of a call, while its forward runs."""


@contextlib.contextmanager
def nodes_given_to(hooks: Sequence[NodeHook]) -> Iterator[None]:
    """While AOTAutograd makes an autograd function, let it give each of its nodes to `hooks`, which may be added later.

    The function (torch 2.9) is a class in a function of AOTAutograd, which hands its `apply` to this wrapper.
    """
    stock = RuntimeWrapper.post_compile

    def post_compile(self: Any, compiled_fn: Any, *args: Any, **kwargs: Any) -> Any:
        function = getattr(compiled_fn, "__self__", None)
        if isinstance(function, type) and issubclass(function, torch.autograd.Function):
            _give_nodes(function, hooks)
        return stock(self, compiled_fn, *args, **kwargs)

    with mock.patch.object(RuntimeWrapper, "post_compile", post_compile):
        yield


def _give_nodes(function: Any, hooks: Sequence[NodeHook]) -> None:
    stock = function.forward

    def forward(ctx: Any, *args: Any) -> Any:
        for hook in hooks:
            hook(ctx)
        return stock(ctx, *args)

    function.forward = staticmethod(forward)


def pass_on_undefined(node: Any) -> None:
    """Let the backward of one call leave every gradient undefined if none of the results has one.

    The backward of another compiled graph calls it so: of a piece of a divided graph, of the graph after a graph break.
    """
    is_undefined = False

    def before(gradients: Sequence[Any]) -> None:
        nonlocal is_undefined
        is_undefined = all(gradient is None for gradient in gradients)

    def after(gradients: Sequence[Any], _: Any) -> tuple[Any, ...] | None:
        return (None,) * len(gradients) if is_undefined else None

    node.register_prehook(before)
    node.register_hook(after)
