"""What is noted while a capture is compiled, for processes that will load it from the disk cache."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from torch import fx

from kp_dynamo.autograd.interface import Differentiated, Interface, NotDescribedError, interface_of
from kp_dynamo.lowering import Executable, LoweringSpec
from kp_dynamo.runtime.stored_graph import NotStorableError, StoredGraph, stored_graph

logger = logging.getLogger(__name__)

INFERENCE, TRAINING = ["inference"], ["backward", "forward"]


class CaptureRecord:
    """The interface and the graphs of one capture. AOTAutograd may trace a graph twice: the last trace counts."""

    def __init__(self) -> None:
        self._interface: Interface | None = None
        self._graphs: dict[str, tuple[StoredGraph, bytes]] = {}
        self._refusal = ""
        self.xla_s = 0.0

    @property
    def refusal(self) -> str:
        """Why the capture is not stored; "" if it can be."""
        if self._refusal:
            return self._refusal
        is_whole = self._interface is not None and sorted(self._graphs) in (INFERENCE, TRAINING)
        return "" if is_whole else "it has no program"

    def refuse(self, reason: str) -> None:
        """Do not store the capture; the first reason counts."""
        self._refusal = self._refusal or reason

    def note(self, differentiated: Differentiated) -> None:
        """Note what AOTAutograd found."""
        try:
            self._interface = interface_of(differentiated)
        except NotDescribedError as reason:
            self.refuse(str(reason))
        except Exception as problem:  # noqa: BLE001 - the capture is compiled all the same
            self._fail(problem)

    def add(self, name: str, gm: fx.GraphModule, spec: LoweringSpec, executable: Executable | None) -> None:
        """Note a graph, which was compiled."""
        if executable is not None:
            self.xla_s += executable.seconds.get("xla", 0.0)
        try:
            self._graphs[name] = stored_graph(gm, spec, executable)
        except NotStorableError as reason:
            self.refuse(str(reason))
        except Exception as problem:  # noqa: BLE001 - the capture is compiled all the same
            self._fail(problem)

    def _fail(self, problem: Exception) -> None:
        logger.debug("a capture cannot be described", exc_info=problem)
        self.refuse(f"{type(problem).__name__} while it was described")

    def plain(self) -> tuple[dict[str, Any], list[bytes]]:
        """The plain values of a capture without a refusal, and the modules of its graphs, by their sorted names."""
        assert self._interface is not None
        names = sorted(self._graphs)
        graphs = {name: asdict(self._graphs[name][0]) for name in names}
        return {"interface": asdict(self._interface), "graphs": graphs}, [self._graphs[name][1] for name in names]
