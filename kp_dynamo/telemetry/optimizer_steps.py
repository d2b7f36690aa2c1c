"""Who is told when the step of a torch.optim.Optimizer ends: nobody, unless a watch is on."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class StepObserver(Protocol):
    """Is told in the thread of the step. It must not raise."""

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """The step of the optimizer ended."""


_observers: tuple[StepObserver, ...] = ()
_is_registered = False
_lock = threading.Lock()


def tell(observer: StepObserver) -> None:
    """Tell `observer` of the steps of all threads.

    The hook stays registered: torch.compile reads the hooks of a compiled step, and each change of them compiles the
    code around it again, up to Dynamo's recompile limit.
    """
    global _observers, _is_registered
    with _lock:
        _observers = (*_observers, observer)
        if not _is_registered:
            register_optimizer_step_post_hook(torch._dynamo.disable(_on_step))
            _is_registered = True


def tell_no_more(observer: StepObserver) -> None:
    """Tell it no longer."""
    global _observers
    with _lock:
        _observers = tuple(other for other in _observers if other is not observer)


def _on_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for observer in _observers:
        observer.optimizer_stepped(optimizer)
