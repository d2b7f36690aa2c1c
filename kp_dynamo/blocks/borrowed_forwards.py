"""Forwards that the repeated children of a model borrow for as long as a compiled call of the model runs.

`compile_blocks` sets the `forward` of repeated children for good. Here they get it at the start of a call and lose it
at its end, also if the call raises: between calls, and for its copies and pickles, the model is what it was.

The first of several calls at once decides for all of them, and the children lose it with the last. Whoever calls the
plain model meanwhile, such as another thread, runs the forward of the child's class: Dynamo is not active there.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import skip_code

from kp_dynamo.blocks.block_calls import BlockForward, BlockGroup, Compile
from kp_dynamo.blocks.call_changes import ChildrenDiffer
from kp_dynamo.blocks.call_results import tensors_in
from kp_dynamo.blocks.child_modules import replaces_forward
from kp_dynamo.compat.dynamo_trace import is_dynamo_active

logger = logging.getLogger(__name__)


_lock = threading.Lock()
_num_calls: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


class BorrowedForward(BlockForward):
    """The forward of a child during a compiled call of its model."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """A call outside of a graph; one that Dynamo would not compile, as under `checkpoint`, runs as it is."""
        if not is_dynamo_active():
            return type(self.child).forward(self.child, *args, **kwargs)
        return super().run(*args, **kwargs)


class Borrowing:
    """Lends the repeated children of one compiled model their forwards.

    Args:
        found: Equal children with their module path, as `repeated_children` finds them.
        compile_forward: Compiles a function for calls outside of a graph.

    Attributes:
        is_over: Whether children turned out to differ, so that every call follows all of them.
    """

    def __init__(self, found: Iterable[tuple[str, list[nn.Module]]], compile_forward: Compile) -> None:
        self.is_over = False
        groups = [(BlockGroup(name, compile_forward, is_asked_for=False), children) for name, children in found]
        self._forwards = [BorrowedForward(child, group) for group, children in groups for child in children]

    def begin(self, *, borrows: bool) -> None:
        """The start of a call. The first of several at once decides for all: Dynamo must not see a child change."""
        with _lock:
            for forward in self._forwards:
                num_calls = _num_calls.get(forward.child, 0)
                # A forward of the child's own, such as that of `compile_blocks`, stays.
                if borrows and num_calls == 0 and not replaces_forward(forward.child):
                    vars(forward.child)["forward"] = forward
                _num_calls[forward.child] = num_calls + 1

    def end(self) -> None:
        """The end of a call; the last one of several takes the forwards away."""
        with _lock:
            for child in [forward.child for forward in self._forwards]:
                _num_calls[child] -= 1
                if _num_calls[child] == 0 and isinstance(vars(child).get("forward"), BorrowedForward):
                    del vars(child)["forward"]

    def around(self, model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward`, the compiled forward of `model`, with borrowed forwards where no gradients are recorded."""
        buffers = [module._buffers for module in model.modules() if module._buffers]

        def versions(given: Any) -> list[int]:
            held = [tensor for tensors in buffers for tensor in tensors.values() if tensor is not None]
            return [0 if tensor.is_inference() else tensor._version for tensor in (*tensors_in(given), *held)]

        def call(*args: Any, **kwargs: Any) -> Any:
            borrows = not self.is_over and not torch.is_grad_enabled()
            state, before = (torch.get_rng_state(), versions((args, kwargs))) if borrows else (None, [])
            self.begin(borrows=borrows)
            try:
                return forward(*args, **kwargs)
            except Exception as error:
                if not _is_of_children(error):
                    raise
                self.is_over = True
                if state is None or versions((args, kwargs)) != before:
                    raise  # a second run would write again, such as the statistics of BatchNorm
                logger.debug("every child module is followed from now on: %s", error)
            finally:
                self.end()
            torch.set_rng_state(state)
            return call(*args, **kwargs)

        skip_code(call.__code__)
        skip_code(versions.__code__)
        # Another compilation that reaches `call` inlines what it wraps, because of the attributes of `forward`.
        return functools.wraps(forward)(call)


for function in (BorrowedForward.run, Borrowing.begin, Borrowing.end):
    skip_code(function.__code__)


def _is_of_children(error: Exception) -> bool:
    return isinstance(error, ChildrenDiffer) or isinstance(getattr(error, "inner_exception", None), ChildrenDiffer)
