"""Who is told of the programs that this process calls and compiles: nobody, unless a watch is on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol


class CallObserver(Protocol):
    """Is told, in the thread of a call, before and after it. Its methods must not raise."""

    def called(self, graph: str) -> None:
        """A program of the graph, "1.forward", is about to be called."""

    def returned(self, graph: str) -> None:
        """That call returned, or raised."""

    def compiles(self, graph: str) -> None:
        """A program of the graph is about to be compiled."""

    def compiled(self, graph: str) -> None:
        """It was compiled, or could not be."""


# Every call of a program reads it. A tuple, so that a call sees the same observers before and after.
observers: tuple[CallObserver, ...] = ()
_lock = threading.Lock()


def add(observer: CallObserver) -> None:
    """Tell `observer` of the calls of all threads."""
    global observers
    with _lock:
        observers = (*observers, observer)


def remove(observer: CallObserver) -> None:
    """Tell it no longer."""
    global observers
    with _lock:
        observers = tuple(other for other in observers if other is not observer)


@contextlib.contextmanager
def compiling(graph: str) -> Iterator[None]:
    """Tell the observers that a program of the graph is compiled in the block."""
    told = observers
    for observer in told:
        observer.compiles(graph)
    try:
        yield
    finally:
        for observer in told:
            observer.compiled(graph)
